import torch

from hasten.weights.memory import bytes_of, fits, is_plain


def test_plain_tensors():
    assert is_plain(torch.zeros(2, 3))
    assert is_plain(torch.nn.Parameter(torch.zeros(2)))
    for other in (3, torch.zeros(2, 3).t(), torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()):
        assert not is_plain(other)
    assert not is_plain(torch.zeros(2, dtype=torch.complex64).conj())


def test_what_fits():
    assert fits(torch.zeros(2), torch.ones(2))
    assert not fits(torch.zeros(3), torch.ones(2))
    assert not fits(torch.zeros(2).half(), torch.ones(2))
    assert not fits(None, torch.ones(2))


def test_bytes_are_the_memory_itself():
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    bytes_of(tensor)[1] = 0x80
    assert torch.signbit(tensor[0])
    assert bytes_of(torch.tensor(1, dtype=torch.int16)).tolist() == [1, 0]
    assert bytes_of(torch.tensor([True, False])).tolist() == [1, 0]
