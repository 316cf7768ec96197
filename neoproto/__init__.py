"""NeoProto: reinforcement-learning post-training of language models on Monarch meshes."""
