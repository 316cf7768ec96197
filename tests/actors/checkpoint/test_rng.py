import json
import random

import numpy as np
import torch

from actors.checkpoint.rng import rng_state, seed_all, set_rng_state

CPU = torch.device("cpu")


def draws():
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.standard_normal())]


def test_every_generator_goes_on_where_its_state_was_taken_and_json_carries_it():
    seed_all("here")
    draws()  # half of a Gaussian pair is kept by Python and NumPy
    text = json.dumps(rng_state(CPU))
    expected = [draws() for _ in range(3)]
    seed_all("elsewhere")
    set_rng_state(json.loads(text), CPU)
    assert [draws() for _ in range(3)] == expected


def test_seeding_depends_on_everything_given_and_on_nothing_else():
    seed_all(1, 2)
    first = draws()
    seed_all(1, 3)
    second = draws()
    seed_all(1, 2)
    assert draws() == first
    assert all(one != other for one, other in zip(first, second, strict=True))
