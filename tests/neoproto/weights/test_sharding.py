import torch

from neoproto.weights.sharding import is_sharded, whole_tensor


def test_a_plain_tensor_is_whole():
    tensor = torch.ones(2)
    assert not is_sharded(tensor)
    assert whole_tensor(tensor) is tensor


def test_dtensors_are_recognised_by_what_they_offer():
    from torch.distributed.tensor import DTensor

    assert callable(DTensor.full_tensor)
    assert not hasattr(torch.nn.Parameter(torch.ones(2)), "full_tensor")
