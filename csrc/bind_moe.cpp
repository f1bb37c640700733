// Mixture of experts.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "bind.h"
#include "cpu/moe.h"

namespace nb = nanobind;

namespace quire::cpu {

namespace {

// (form, group, has_offset, rotation, stride of int8 rows); form 0: not quantized (quantized.h).
using FormatWords = std::tuple<int, int64_t, bool, int64_t, int64_t>;

QuantizedFormat format_of(const FormatWords& words) {
  return QuantizedFormat::of(std::get<0>(words), std::get<1>(words), std::get<2>(words));
}

// (the ranks, address of the table, its width, address of the loads, number of experts).
using PlaceWords = std::tuple<Channel*, uintptr_t, int64_t, uintptr_t, int64_t>;

ExpertsArgs shape_of(const std::string& type, int64_t tokens, int64_t hidden, int64_t inter, int64_t slots,
                     int64_t top_k, const FormatWords& up, const FormatWords& down,
                     const std::optional<PlaceWords>& places) {
  ExpertsArgs args{};
  args.tokens = tokens, args.hidden = hidden, args.inter = inter, args.slots = slots, args.top_k = top_k;
  if (places) {
    const auto& [channel, table, width, loads, experts] = *places;
    args.places = {channel, at<int64_t>(table), at<int64_t>(loads), experts, width};
  }
  args.up_format = format_of(up), args.down_format = format_of(down);
  args.up_rotation = std::get<3>(up), args.down_rotation = std::get<3>(down);
  args.up_stride = std::get<4>(up), args.down_stride = std::get<4>(down);
  args.type = type_of(type);
  return args;
}

}  // namespace

void bind_moe(nb::module_& m) {
  m.def(
      "route",
      [](int num_threads, uintptr_t logits, uintptr_t correction, int scoring, int64_t tokens, int64_t num_experts,
         int64_t top_k, int64_t groups, int64_t top_groups, bool group_by_two, bool normalize, float scale,
         uintptr_t weights, uintptr_t ids, uintptr_t factors) {
        const RouteArgs args{at<float>(logits),
                             at<float>(correction),
                             at<float>(weights),
                             at<int64_t>(ids),
                             tokens,
                             num_experts,
                             top_k,
                             groups,
                             top_groups,
                             static_cast<Scoring>(scoring),
                             group_by_two,
                             normalize,
                             scale,
                             at<float>(factors)};
        submit(num_threads, args, {&RouteArgs::tokens}, route);
      },
      "Weights and ids [tokens, top_k] of fp32 logits [tokens, num_experts]; correction 0 for none.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "experts_scratch_bytes",
      [](const std::string& type, int64_t tokens, int64_t hidden, int64_t inter, int64_t slots, int64_t top_k,
         const FormatWords& up, const FormatWords& down, const std::optional<PlaceWords>& places) {
        return experts_scratch_bytes(shape_of(type, tokens, hidden, inter, slots, top_k, up, down, places));
      },
      "Bytes of scratch memory that `experts` needs for as many tokens or fewer.");
  m.def(
      "experts",
      [](int num_threads, const std::string& isa, const std::string& type, uintptr_t x, int64_t x_stride,
         uintptr_t weights, uintptr_t ids, uintptr_t gate_up, uintptr_t down, int gate, uintptr_t y, uintptr_t scratch,
         int64_t tokens, int64_t hidden, int64_t inter, int64_t slots, int64_t top_k, const FormatWords& up,
         const FormatWords& down_format, const std::optional<PlaceWords>& places) {
        ExpertsArgs args = shape_of(type, tokens, hidden, inter, slots, top_k, up, down_format, places);
        args.x = at<void>(x), args.x_stride = x_stride;
        args.weights = at<float>(weights), args.ids = at<int64_t>(ids);
        args.gate_up = at<ExpertMatrix>(gate_up), args.down = at<ExpertMatrix>(down);
        args.gate = static_cast<Gate>(gate);
        args.y = at<void>(y), args.scratch = at<char>(scratch);
        args.linear = &kernels_of<LinearKernels>(isa);
        args.quantized = quantized_kernels(isa.c_str());
        args.gated = &kernels_of<GatedKernels>(isa);
        submit(num_threads, args, {&ExpertsArgs::tokens}, experts);
      },
      "y[tokens, hidden] = sum over a token's choices of weight * down(act(gate_up(x))); gate_up and down are tables of "
      "four addresses per expert; places None for one process.",
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
