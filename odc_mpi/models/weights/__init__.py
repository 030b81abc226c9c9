"""Sources of the initial weights of transformers models: random initialization and safetensors files."""
