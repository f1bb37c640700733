"""The paged KV cache as bookkeeping: block ids, never bytes. No torch, no clock, no I/O."""
