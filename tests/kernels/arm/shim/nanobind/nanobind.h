// Stands in for nanobind where there is no Python: the binding files register their functions here by name, and a
// function is called with the values of a case. One header for nanobind.h and the stl casters.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace nanobind {

struct Value {
  bool none = false;
  int64_t integer = 0;  // or an address
  double real = 0.0;
  std::string text;
  std::vector<Value> items;
};

template <typename T>
struct Caster {
  static T from(const Value& v) {
    if constexpr (std::is_floating_point_v<T>) return static_cast<T>(v.real);
    else if constexpr (std::is_pointer_v<T>) return nullptr;
    else return static_cast<T>(v.integer);
  }
};
template <>
struct Caster<std::string> {
  static std::string from(const Value& v) { return v.text; }
};
template <typename T>
struct Caster<std::optional<T>> {
  static std::optional<T> from(const Value& v) {
    return v.none ? std::optional<T>() : std::optional<T>(Caster<T>::from(v));
  }
};
template <typename T, size_t N>
struct Caster<std::array<T, N>> {
  static std::array<T, N> from(const Value& v) {
    std::array<T, N> a{};
    for (size_t i = 0; i < N; ++i) a[i] = Caster<T>::from(v.items.at(i));
    return a;
  }
};
template <typename T>
struct Caster<std::vector<T>> {
  static std::vector<T> from(const Value& v) {
    std::vector<T> a;
    for (const Value& item : v.items) a.push_back(Caster<T>::from(item));
    return a;
  }
};
template <typename A, typename B>
struct Caster<std::pair<A, B>> {
  static std::pair<A, B> from(const Value& v) {
    return {Caster<A>::from(v.items.at(0)), Caster<B>::from(v.items.at(1))};
  }
};
template <typename... T>
struct Caster<std::tuple<T...>> {
  static std::tuple<T...> from(const Value& v) { return take(v, std::index_sequence_for<T...>()); }
  template <size_t... I>
  static std::tuple<T...> take(const Value& v, std::index_sequence<I...>) {
    return {Caster<T>::from(v.items.at(I))...};
  }
};

using Function = std::function<void(const std::vector<Value>&)>;

template <typename F, typename R, typename... A, size_t... I>
Function wrap(F f, R (F::*)(A...) const, std::index_sequence<I...>) {
  return [f](const std::vector<Value>& v) {
    if (v.size() != sizeof...(A)) throw std::invalid_argument("number of arguments");
    f(Caster<std::decay_t<A>>::from(v[I])...);
  };
}
template <typename F, typename R, typename... A>
Function wrap(F f, R (F::*call)(A...) const) {
  return wrap(f, call, std::index_sequence_for<A...>());
}

class module_ {
 public:
  std::map<std::string, Function> functions;

  template <typename F, typename... Extra>
  void def(const char* name, F f, const Extra&...) {
    functions[name] = wrap(f, &F::operator());
  }
  int64_t& attr(const char* name) { return attributes_[name]; }

 private:
  std::map<std::string, int64_t> attributes_;
};

struct gil_scoped_release {};
template <typename T>
struct call_guard {};

}  // namespace nanobind
