"""Planted faults in what engines give each other: who is told, what is taken for whole, and what may be evicted."""

from __future__ import annotations

from mutant import Mutant

PEERS = "tests/tiers/test_peers.py::"
MEMORY = "tests/tiers/test_memory.py::"
GATEWAY = "tests/gateway/test_disaggregation.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "peer-without-proof",
        "an engine that does not have the peers' secret is given what prompts have left",
        "src/quire/tiers/peer_wire.py",
        '    if not hmac.compare_digest(proof, _proof(secret, b"taker", hello + answer + its_root)):',
        "    if False:",
        (f"{PEERS}test_a_taker_without_the_secret_gets_no_answer",),
    ),
    Mutant(
        "peer-believed-without-proof",
        "blocks are taken from a stranger at a peer's address",
        "src/quire/tiers/peer_wire.py",
        '    if not hmac.compare_digest(proof, _proof(secret, b"giver", hello + answer)):',
        "    if False:",
        (f"{PEERS}test_a_giver_without_the_secret_is_not_believed",),
    ),
    Mutant(
        "proof-sent-back",
        "a peer's own proof is taken for that of the one who asks",
        "src/quire/tiers/peer_wire.py",
        'hmac.digest(secret, b"quire.kv.peer " + role + b"\\0" + said, "sha256")',
        'hmac.digest(secret, b"quire.kv.peer " + said[:68], "sha256")',
        (f"{PEERS}test_a_taker_without_the_secret_gets_no_answer",),
    ),
    Mutant(
        "block-of-a-peer-not-checked",
        "what a peer has sent is a block, whatever it is",
        "src/quire/tiers/peer.py",
        "        return is_whole(self._root, key, header, buffer)\n",
        "        return True\n",
        (f"{PEERS}test_what_a_peer_gets_wrong_is_no_block[payload]",),
    ),
    Mutant(
        "lease-not-kept",
        "a block is evicted before the peer comes that it was computed for",
        "src/quire/tiers/memory.py",
        "if self._blocks[oldest].leased_until_s > now_s:",
        "if False:",
        (f"{MEMORY}test_leased_blocks_stay_and_others_make_room",),
    ),
    Mutant(
        "change-not-told",
        "peers go on asking for blocks that were evicted",
        "src/quire/tiers/memory.py",
        "        self._note(key, is_added=False)\n",
        "",
        (f"{MEMORY}test_changes_give_what_there_is",),
    ),
    Mutant(
        "prefill-replica-answers",
        "prefill replicas are given whole requests, which hold up the prompts of others",
        "src/quire_gateway/disaggregation.py",
        'if backend.args.role != "prefill"] or candidates',
        "] or candidates",
        (f"{GATEWAY}test_a_long_prompt_is_computed_by_one_and_answered_by_another",),
    ),
    Mutant(
        "failed-prefill-fails-the-request",
        "a prefill replica that dies takes the request along",
        "src/quire_gateway/disaggregation.py",
        "        except (BackendFailed, TimeoutError) as failure:",
        "        except ZeroDivisionError as failure:",
        (f"{GATEWAY}test_a_first_call_that_fails_costs_a_computation[dies]",),
    ),
    Mutant(
        "short-prompts-travel",
        "prompts that a decode replica has go to a prefill replica all the same",
        "src/quire_gateway/disaggregation.py",
        "uncached < self._min_tokens",
        "uncached < 0",
        (f"{GATEWAY}test_what_the_decode_replica_has_stays_there",),
    ),
)
