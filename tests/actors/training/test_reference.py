import torch

from actors.training.policy import Policy
from actors.training.ranks import Ranks
from actors.training.reference import Reference, ReferenceOptions, ReferenceWorker
from actors.training.torch_model import ModelOptions
from neoproto.data import DataProto
from tests.actors.tiny_llama import make_batch
from tests.actors.training.test_policy import options


def test_it_gives_the_log_probs_of_the_model_that_training_starts_from(llama_folder):
    columns = make_batch(8)
    policy = Policy(options(llama_folder, temperature=0.7), Ranks())
    reference = Reference(ReferenceOptions(model=ModelOptions(path=llama_folder), temperature=0.7), Ranks())
    expected = policy.log_probs(columns)["old_log_probs"]
    for _ in range(2):
        assert torch.equal(reference.log_probs(columns)["ref_log_prob"], expected)
        policy.update(columns)
    assert not torch.equal(policy.log_probs(columns)["old_log_probs"], expected)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


def test_the_worker_answers_with_a_batch(llama_folder):
    chosen = ReferenceOptions(model=ModelOptions(path=llama_folder))
    worker = object.__new__(ReferenceWorker)
    worker.rank, worker.world_size, worker.local_rank = 0, 1, 0
    worker.__init__(chosen)
    columns = make_batch(4)
    answer = worker.compute_ref_log_prob(DataProto.from_dict(tensors=columns))
    assert torch.equal(answer["ref_log_prob"], Reference(chosen, Ranks()).log_probs(columns)["ref_log_prob"])
