"""The longest sequences of a minibatch in pieces over ranks: docs/context.md."""
