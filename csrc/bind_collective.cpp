// Collectives between the ranks of one machine.
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "cpu/collective.h"

namespace nb = nanobind;

namespace quire::cpu {

void bind_collective(nb::module_& m) {
  static_assert(sizeof(Lane) == 128 && std::atomic<uint32_t>::is_always_lock_free);
  m.attr("LANE_BYTES") = int64_t(sizeof(Lane));
  nb::class_<Channel>(m, "Channel", "A group of ranks that share a segment of memory.")
      .def(nb::init<uintptr_t, std::vector<uintptr_t>, std::vector<uintptr_t>, std::vector<int>, int, int64_t, double>(),
           nb::arg("abort_word"), nb::arg("lanes"), nb::arg("slots"), nb::arg("ranks"), nb::arg("index"),
           nb::arg("slot_bytes"), nb::arg("limit_s"))
      .def_ro("bytes_sent", &Channel::bytes_sent, "That this rank has written for the others, so far.");
  m.def(
      "collective",
      [](int num_threads, Channel& channel, int what, uintptr_t x, int64_t x_stride, bool from_bf16, uintptr_t y,
         int64_t y_stride, bool to_bf16, int64_t rows, int64_t in, int64_t out, uintptr_t begins) {
        if (what < 0 || what > int(Collective::receive)) throw std::invalid_argument("no such collective");
        const Type from = type_of(from_bf16);
        const int64_t width = from == Type::f32 ? 4 : 2;
        const int64_t* parts = at<int64_t>(begins);
        if ((Collective(what) == Collective::gather) != (parts != nullptr)) {
          throw std::invalid_argument("a gather has begins, the others have none");
        }
        if (std::max(in, out * (Collective(what) == Collective::receive)) * width > channel.slot_bytes()) {
          throw std::invalid_argument("a row is larger than a slot of the shared memory");
        }
        const CollectiveArgs args{&channel, Collective(what), at<void>(x), at<void>(y), rows, in,
                                  out,      x_stride,         y_stride,    from,        type_of(to_bf16), parts};
        submit(num_threads, args, {&CollectiveArgs::rows}, collective);
      },
      "0 all_reduce, 1 all_gather, 2 reduce_scatter, 3 all_to_all, 4 send, 5 receive: csrc/cpu/collective.h.",
      nb::arg("num_threads"), nb::arg("channel"), nb::arg("what"), nb::arg("x"), nb::arg("x_stride"),
      nb::arg("from_bf16"), nb::arg("y"), nb::arg("y_stride"), nb::arg("to_bf16"), nb::arg("rows"), nb::arg("in"),
      nb::arg("out"), nb::arg("begins") = 0, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gather_parts",
      [](int num_threads, Channel& channel, uintptr_t y, const std::vector<int64_t>& begins) {
        if (static_cast<int>(begins.size()) != channel.size() + 1) throw std::invalid_argument("one begin per member");
        submit(num_threads, [&](ThreadPool& pool) { gather_parts(channel, at<char>(y), begins.data(), pool); });
      },
      "Every member's bytes [begins[r], begins[r + 1]) of y, of which its own are there already.",
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "local_ids",
      [](int num_threads, uintptr_t ids, uintptr_t y, int64_t rows, int64_t begin, int64_t end, int64_t other) {
        const LocalIdsArgs args{at<int64_t>(ids), at<int64_t>(y), rows, begin, end, other};
        submit(num_threads, args, {&LocalIdsArgs::rows}, local_ids);
      },
      "y = id - begin for begin <= id < end, otherwise `other`.", nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire::cpu
