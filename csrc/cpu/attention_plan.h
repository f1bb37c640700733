// How one call of attention over tiled blocks is cut into units of work.
//
//   step   64 positions at an absolute multiple of 64, which a unit computes at a time
//   split  512 positions: every split of a row's keys is a softmax of its own, and splits are folded in order of position,
//          whichever thread computed them. So a long context of few rows can use every thread, and no bit changes.
//   unit   up to `kUnitRows` rows (token, query head) of one kv head and all their splits, or one split of few rows; or a
//          few rows each of some kv heads, whose pieces of a block are neighbours in memory
//   group  units of a thread that read the same keys and take turns by splits: a split comes from memory once for all of
//          them, while the one before is computed
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kv_tile.h"

namespace quire::cpu::QUIRE_ISA {

constexpr int64_t kTile = kTilePositions;
constexpr int64_t kStep = 64;
constexpr int64_t kSplitSteps = 8;
constexpr int64_t kUnitRows = 48;     // the state of a unit stays in L1
constexpr int64_t kBlockRows = 16;    // rows of a unit whose products are computed together
constexpr int64_t kRunBytes = 1 << 15;  // read in sequence where a unit may choose: faster than single 4 KiB pages
constexpr int64_t kGroupUnits = 16;
constexpr int64_t kGroupBytes = 256 << 10;  // of a group's rows and their sums, which lie in L2 beside two splits

// Bytes of a tile of the cache (kv_tile.h).
inline int64_t tile_bytes(const AttentionArgs& a) {
  return a.int8 ? TileForm<int8_t>{a.head_dim, a.v_head_dim, a.k_bits, a.v_bits}.stride()
                : TileForm<uint16_t>{a.head_dim, a.v_head_dim}.stride() * static_cast<int64_t>(sizeof(uint16_t));
}

// Bytes of a kv head's piece of a block.
inline int64_t piece_bytes(const AttentionArgs& a) { return a.block_size / kTile * tile_bytes(a); }

// Where the tile with position `position` of a sequence lies.
inline const char* tile_at(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t position) {
  const int64_t block = a.block_table[seq * a.table_width() + position / a.block_size];
  const int64_t piece = (block * a.block_stride + kv_head * a.piece_stride) * (a.int8 ? 1 : 2);
  return static_cast<const char*>(a.pieces) + piece + position % a.block_size / kTile * tile_bytes(a);
}

// The rows of one sequence and kv head: token-major, the group's query heads within a token.
struct SeqRows {
  SeqRows(const AttentionArgs& a, int64_t seq)
      : group(a.num_heads / a.num_kv_heads), first_token(a.cu_seqlens_q[seq]),
        rows((a.cu_seqlens_q[seq + 1] - first_token) * group), start(a.seq_lens[seq] - rows / group),
        window(a.window), stripe(a.stripe()) {}

  int64_t token(int64_t row) const { return first_token + row / group; }
  // Of the positions in this cache, a row sees [lowest, end). There may be none.
  int64_t end(int64_t row) const { return stripe.below(start + row / group + 1); }
  int64_t lowest(int64_t row) const {
    return window == 0 ? 0 : stripe.below(std::max<int64_t>(0, start + row / group - window + 1));
  }

  int64_t group, first_token, rows, start, window;
  Stripe stripe;
};

struct Unit {
  int64_t seq, kv_head, heads;  // kv heads [kv_head, kv_head + heads)
  int64_t first_row, rows;      // of each of them
  int64_t low, high;            // positions that any of its rows sees, as far as they belong to this unit
  int64_t part;                 // where a unit of one split leaves its sums; -1: it finishes its rows

  int64_t all_rows() const { return heads * rows; }

  int64_t first_step() const { return low / kStep; }
  int64_t last_step() const { return high > low ? (high - 1) / kStep : first_step() - 1; }
  // Steps of one split, or of several.
  int64_t steps_in(int64_t begin, int64_t end) const {
    return std::max<int64_t>(0, std::min(last_step() + 1, end) - std::max(first_step(), begin));
  }
  // The cost of a step: its loads, and its rows. A unit without steps still writes its rows.
  int64_t cost() const { return std::max<int64_t>(1, last_step() - first_step() + 1) * heads * (rows + 4); }
};

// Units [begin, end) of a plan. Alone, or several that read the same keys, in order of rows.
struct Group {
  int64_t begin, end;
  int64_t first_step, last_step;  // that any of them reads
  int64_t heads;

  int64_t units() const { return end - begin; }
  int64_t first_split() const { return first_step / kSplitSteps; }
  int64_t last_split() const { return last_step < first_step ? first_split() - 1 : last_step / kSplitSteps; }
};

// A unit whose splits are in parts [first_part, first_part + parts).
struct Fold {
  Unit unit;
  int64_t first_part, parts;
};

struct Plan {
  std::vector<Unit> units;  // neighbours share keys
  std::vector<Fold> folds;
  int64_t cost = 0, parts = 0;

  void make(const AttentionArgs& a, int num_threads) {
    units.clear();
    folds.clear();
    cost = parts = 0;
    int64_t whole = 0;
    for (int64_t seq = 0; seq < a.num_seqs(); ++seq) {
      whole += (SeqRows(a, seq).rows + kUnitRows - 1) / kUnitRows * a.num_kv_heads;
    }
    const int64_t enough = 8 * num_threads;
    const bool split = whole < enough && num_threads > 1;
    const int64_t heads = shares_keys(a) ? 1 : std::max<int64_t>(1, std::min(whole / enough, kRunBytes / piece_bytes(a)));
    // A kv head's sequences are neighbours: a shared prefix comes from L2 after the first of them.
    for (int64_t first = 0; first < a.num_kv_heads; first += heads) {
      const int64_t end = std::min(first + heads, a.num_kv_heads);
      for (int64_t seq = 0; seq < a.num_seqs(); ++seq) {
        const SeqRows rows(a, seq);
        const bool together = rows.rows <= kBlockRows && rows.rows * (end - first) <= kUnitRows;
        const int64_t step = together ? end - first : 1;
        for (int64_t head = first; head < end; head += step) add_rows(seq, head, step, rows, split);
      }
    }
    for (const Unit& unit : units) cost += unit.cost();
  }

  // The units of one thread: those whose middle lies in its share of the cost.
  Range units_of(int thread, int num_threads) const {
    const Range mine = share(cost, thread, num_threads);
    Range range{static_cast<int64_t>(units.size()), static_cast<int64_t>(units.size())};
    int64_t before = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(units.size()); ++i) {
      const int64_t middle = before + units[i].cost() / 2;
      before += units[i].cost();
      if (middle >= mine.begin && range.begin > i) range.begin = i;
      if (middle >= mine.end) {
        range.end = i;
        break;
      }
    }
    range.begin = std::min(range.begin, range.end);
    return range;
  }

  // One thread's units in groups. `row_bytes`: of a row and its sums.
  void groups_of(Range mine, int64_t row_bytes, std::vector<Group>& groups) const {
    groups.clear();
    const int64_t most = std::clamp<int64_t>(kGroupBytes / (row_bytes * kUnitRows), 1, kGroupUnits);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const Unit& unit = units[i];
      if (!groups.empty() && groups.back().units() < most && goes_on(units[i - 1], unit)) {
        groups.back().end = i + 1;
        groups.back().last_step = std::max(groups.back().last_step, unit.last_step());
      } else {
        groups.push_back({i, i + 1, unit.first_step(), unit.last_step(), unit.heads});
      }
    }
  }

 private:
  // Whether `next` has the rows behind those of `unit`.
  static bool goes_on(const Unit& unit, const Unit& next) {
    return next.seq == unit.seq && next.kv_head == unit.kv_head && next.first_row > unit.first_row;
  }

  // Whether most sequences have the middle of their keys in common with the one before.
  static bool shares_keys(const AttentionArgs& a) {
    int64_t shared = 0;
    for (int64_t seq = 1; seq < a.num_seqs(); ++seq) {
      const int64_t middle = a.stripe().below(a.seq_lens[seq] / 2);
      const int64_t* block = a.block_table + seq * a.table_width() + middle / a.block_size;
      shared += *block == block[-a.table_width()];
    }
    return 2 * shared > a.num_seqs();
  }

  void add_rows(int64_t seq, int64_t kv_head, int64_t heads, const SeqRows& rows, bool split) {
    for (int64_t row = 0; row < rows.rows; row += kUnitRows) {
      const int64_t count = std::min(kUnitRows, rows.rows - row);
      add({seq, kv_head, heads, row, count, rows.lowest(row), rows.end(row + count - 1), -1},
          split && rows.rows <= kUnitRows);
    }
  }

  void add(const Unit& unit, bool split) {
    constexpr int64_t kPositions = kSplitSteps * kStep;
    const int64_t first = unit.low / kPositions, last = (unit.high - 1) / kPositions;
    if (!split || first >= last) {
      units.push_back(unit);
      return;
    }
    folds.push_back({unit, parts, last - first + 1});
    for (int64_t s = first; s <= last; ++s) {
      Unit part = unit;
      part.low = std::max(unit.low, s * kPositions);
      part.high = std::min(unit.high, (s + 1) * kPositions);
      part.part = parts++;
      units.push_back(part);
    }
  }
};

}  // namespace quire::cpu::QUIRE_ISA
