"""NeoProto: reinforcement-learning post-training of language models on Monarch meshes."""

from neoproto.packages import install

install()
del install
