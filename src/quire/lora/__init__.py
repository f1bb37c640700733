"""LoRA adapters: what PEFT writes, read and checked, and the slots of a worker that hold them."""
