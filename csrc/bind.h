// What the binding files share: addresses, names of types and levels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "cpu/levels.h"
#include "cpu/linear.h"
#include "tape.h"

namespace quire::cpu {

// Tensors are passed as addresses (torch's data_ptr()); the Python side has checked shapes, types and strides.
template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Type type_of(const std::string& name) {
  if (name == "bfloat16") return Type::bf16;
  if (name == "float32") return Type::f32;
  throw std::invalid_argument("type must be bfloat16 or float32, not " + name);
}

inline Type type_of(bool bf16) { return bf16 ? Type::bf16 : Type::f32; }

template <typename Kernels>
const Kernels& kernels_of(const std::string& isa) {
  const Kernels* kernels = kernels_for<Kernels>(isa.c_str());
  if (kernels == nullptr) throw std::invalid_argument("this CPU or build has no kernels for " + isa);
  return *kernels;
}

// One per file; `bindings.cpp` calls them all.
void bind_linear(nanobind::module_& m);
void bind_quantized(nanobind::module_& m);
void bind_norm(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_pointwise(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_moe(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
void bind_collective(nanobind::module_& m);
void bind_recurrent(nanobind::module_& m);

}  // namespace quire::cpu
