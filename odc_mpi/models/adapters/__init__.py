"""LoRA adapters: adding them to a model, reading and writing them, and checks of their settings and base."""
