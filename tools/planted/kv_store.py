"""Planted faults in the store of a disk tier: what it takes for whole, whom it lets read, and how large it gets."""

from __future__ import annotations

from mutant import Mutant

DAMAGE = "tests/tiers/test_damage.py::"
STORE = "tests/tiers/test_disk_store.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "checksum-of-a-block-not-checked",
        "a block whose bytes have changed on the disk is read as whole",
        "src/quire/tiers/record.py",
        "return found.checksum == crc32(payload, _seed(root, key, payload.nbytes))",
        "return True",
        (f"{DAMAGE}test_one_changed_byte_costs_a_sealed_segment_one_block",),
    ),
    Mutant(
        "checksum-of-a-table-not-checked",
        "a table of contents that has changed hides blocks, or loses the segment",
        "src/quire/tiers/segment.py",
        "if len(table) != num_bytes or crc32(table) != checksum:",
        "if len(table) != num_bytes:",
        (f"{DAMAGE}test_one_changed_byte_costs_a_sealed_segment_one_block",),
    ),
    Mutant(
        "short-read-taken-for-whole",
        "a block behind the end of a cut segment is said to be read",
        "src/quire/tiers/spans.py",
        "if entry.end - start > num_read or not is_whole(",
        "if num_read and not is_whole(",
        ("tests/tiers/test_full_disk.py::test_a_read_that_gives_nothing_is_no_block",),
    ),
    Mutant(
        "segment-of-another-root",
        "blocks of another model are found where their segment was moved",
        "src/quire/tiers/record.py",
        " or its_root != root or",
        " or",
        (f"{STORE}test_roots_are_apart",),
    ),
    Mutant(
        "tier-without-bound",
        "the folder grows without end",
        "src/quire/tiers/folder.py",
        "        surplus = sum(info.size for info in segments) + num_bytes - self.size_bytes\n",
        "        surplus = 0\n",
        (f"{STORE}test_bound_holds_and_oldest_segments_go",),
    ),
    Mutant(
        "block-visible-before-it-is-whole",
        "a reader in another process is told of a block whose bytes are still being written",
        "src/quire/tiers/segment.py",
        "        return list(self._scan(min(head.end, self.size())))\n",
        "        return list(self._scan(self.size()))\n",
        (f"{STORE}test_a_block_that_is_being_written_is_not_seen",),
    ),
    Mutant(
        "segments-for-all-to-read",
        "other users of the machine may read what prompts have left",
        "src/quire/private.py",
        "return os.open(path, flags | os.O_CLOEXEC, 0o600)",
        "return os.open(path, flags | os.O_CLOEXEC, 0o644)",
        (f"{STORE}test_only_this_user_may_read",),
    ),
)
