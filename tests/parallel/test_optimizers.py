"""Each optimizer over divided parameters does what it does in one process."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hasten import Accelerator, GradScalerKwargs
from hasten.parallel import stepping
from hasten.parallel.fsdp import FullyShardedDataParallelPlugin
from tests.ranks import run_ranks

SHAPES = [(7, 5), (3,), (1, 9), (8, 4), (2, 3, 5), (6,)]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def random(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def of(kind: Any, matrices: bool = False, **settings: Any) -> Make:
    settings = {"lr": 0.05, **settings}
    return lambda parameters: kind([each for each in parameters if not matrices or each.dim() == 2], **settings)


def of_torch() -> dict[str, Make]:
    """Every optimizer of torch, in each of its ways to compute, except for those that are refused."""
    found: dict[str, Make] = {
        "AdamW amsgrad": of(torch.optim.AdamW, amsgrad=True, weight_decay=0.1),
        "SGD nesterov": of(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
        "RMSprop centered": of(torch.optim.RMSprop, centered=True, momentum=0.9),
        "Adagrad from 0.1": of(torch.optim.Adagrad, initial_accumulator_value=0.1),
    }
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            continue
        if name in ("Optimizer", "LBFGS", "SparseAdam"):
            continue
        known = inspect.signature(kind).parameters
        extra = {"momentum": 0.9} if name == "SGD" else {}
        for way in ("foreach", "fused"):
            if way in known:
                found[f"{name} {way}"] = of(kind, **{way: True}, **extra)
        extra |= {"foreach": False} if "foreach" in known else {}
        found[name] = of(kind, matrices=name == "Muon", **extra)
    return found


def train(make: Make, steps: int, spread: Callable[[Tensor], Any] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after some steps in training mode, and then in evaluation mode."""
    place = spread or (lambda tensor: tensor)
    parameters = [nn.Parameter(place(tensor)) for tensor in random(0)]
    optimizer = make(parameters)
    if spread is not None:
        stepping.adapt(optimizer)
    mode: Any = optimizer
    if hasattr(optimizer, "train"):
        mode.train()
    for step in range(steps):
        for index, (parameter, gradient) in enumerate(zip(parameters, random(1 + step), strict=True)):
            if index != len(SHAPES) - 1 and (index, step) != (
                2,
                steps - 1,
            ):  # some never have a gradient, or not always
                parameter.grad = place(gradient)
        optimizer.step()
        optimizer.zero_grad()
        known = {id(each) for each in parameters}
        assert {id(each) for each in optimizer.param_groups[0]["params"]} | set(map(id, optimizer.state)) <= known
    after = whole(parameters)
    if hasattr(optimizer, "eval"):
        mode.eval()
    return after, whole(parameters)


def whole(parameters: list[Any]) -> list[Tensor]:
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in parameters]


def compare(build: Callable[[], dict[str, Make]], dim: int = 0, steps: int = 3) -> dict[str, float]:
    """By optimizer, the largest difference from one process."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def spread(tensor: Tensor) -> Any:
        return distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.dim() - 1))])

    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in build().items():
            expected, own = train(make, steps), train(make, steps, spread)
            moved = [not torch.equal(one, other) for one, other in zip(expected[0], random(0), strict=True)]
            assert any(moved) or name.startswith("RAdam ") or name == "RAdam"
            pairs = [
                pair for before, after in zip(expected, own, strict=True) for pair in zip(before, after, strict=True)
            ]
            found[name] = max((one - other).abs().max().item() for one, other in pairs)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_optimizer_does_what_it_does_in_one_process(ranks):
    for found in run_ranks(compare, ranks, of_torch, timeout=60):
        assert found
        assert {name: difference for name, difference in found.items() if difference > 1e-6} == {}


def test_parameters_may_be_divided_along_another_dimension():
    for found in run_ranks(compare, 2, of_torch, 1, timeout=60):
        assert {name: difference for name, difference in found.items() if difference > 1e-6} == {}


# ---- with an Accelerator ----


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.05, weight_decay=0.0)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def accelerator(**fields: Any) -> Accelerator:
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**fields))


def small(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3), nn.Linear(3, 1))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_steps(model: nn.Module, optimizers: list[Any], ranks: int, steps: int = 3, clip: float = 1.0) -> list[Tensor]:
    for step in range(steps):
        for rank in range(ranks):
            (model(batch(rank, step)).square().mean() / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return whole(list(model.parameters()))


def sharded_steps(
    own: Accelerator, model: nn.Module, optimizers: list[Any], clipped: Any = None, steps: int = 3
) -> list[Tensor]:
    for step in range(steps):
        own.backward(model(batch(own.process_index, step)).square().mean())
        clipped = list(model.parameters()) if clipped is None else clipped
        own.clip_grad_norm_(clipped, 1.0)
        own.clip_grad_value_(clipped, 1.0)  # has no effect after that, but must find them
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return whole(list(model.parameters()))


def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Matrices for one optimizer, and everything else for another."""
    parameters = list(model.parameters())
    return [each for each in parameters if each.dim() == 2], [each for each in parameters if each.dim() != 2]


def two_optimizers(order: str) -> list[Tensor]:
    own = accelerator(min_num_params=10, auto_wrap_policy="size_based_wrap")
    model = small()
    matrices, others = split(model)
    first, second = muon(matrices), adamw(others)
    if order == "together":
        first, model, second = own.prepare(first, model, second)
    elif order == "before":
        first, second = own.prepare(first, second)
        model = own.prepare(model)
    elif order == "after":
        model = own.prepare(model)
        first, second = own.prepare(first), own.prepare(second)
        assert own.prepare(first) is first
    else:  # built of what the model has become
        model = own.prepare(model)
        matrices, others = split(model)
        first, second = own.prepare(muon(matrices), adamw(others))
    # The parameters that were listed before the model was prepared can still be clipped.
    return sharded_steps(own, model, [first, second], [*matrices, *others])


@pytest.mark.parametrize("order", ["together", "before", "after", "built after"])
def test_two_optimizers_share_a_model(order):
    model = small()
    matrices, others = split(model)
    expected = plain_steps(model, [muon(matrices), adamw(others)], 2)
    for found in run_ranks(two_optimizers, 2, order):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def groups_that_come_later(named: bool) -> tuple[list[Tensor], list[int]]:
    own = accelerator()
    model: Any = small()
    model[4].weight.requires_grad_(False)
    first, later = list(model[0].parameters()), list(model[2].named_parameters() if named else model[2].parameters())
    optimizer = adafactor([*model[0].named_parameters()] if named else first)
    model, optimizer = own.prepare(model, optimizer)
    optimizer.add_param_group({"params": later, "lr": 0.2})
    assert all(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"])
    return sharded_steps(own, model, [optimizer]), [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("named", [False, True])
def test_groups_may_come_later_and_the_rest_stays(named):
    model: Any = small()
    model[4].weight.requires_grad_(False)
    optimizer = adafactor(model[0].parameters())
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2})
    expected = plain_steps(model, [optimizer], 2)
    for found, sizes in run_ranks(groups_that_come_later, 2, named):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert sizes == [2, 1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(inputs))))  # type: ignore[no-any-return]


def tied_model() -> Tied:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tied()


def tied() -> list[Tensor]:
    own = accelerator()
    model = tied_model()
    model, optimizer = own.prepare(model, adafactor(model.parameters()))
    found = sharded_steps(own, model, [optimizer])
    assert model.second.weight is model.first.weight
    return found


def test_a_tied_parameter_is_updated_once():
    model = tied_model()
    expected = plain_steps(model, [adafactor(model.parameters())], 2)
    for found in run_ranks(tied, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def forgotten() -> list[str]:
    own = accelerator()
    model = small()
    optimizer = adamw(model.parameters())
    old = model[0].weight
    own.prepare(model)
    texts = []
    for use in (optimizer.step, optimizer.zero_grad, lambda: old + 1):
        with pytest.raises(RuntimeError, match="no longer has") as caught:
            use()
        texts.append(str(caught.value))
    own.prepare(optimizer)  # it is not too late
    optimizer.step()
    return texts


def test_an_optimizer_that_was_not_prepared_says_so():
    for texts in run_ranks(forgotten, 2):
        assert all("accelerator.prepare(optimizer)" in text for text in texts)


def strangers() -> list[bool]:
    """Optimizers that have nothing to do with a prepared model."""
    own = accelerator()
    other = nn.Linear(5, 3)
    before = list(other.parameters())
    optimizer = own.prepare(torch.optim.LBFGS(other.parameters()))
    mesh = init_device_mesh("cpu", (own.num_processes,))
    mine = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    users = own.prepare(adamw([mine]))
    own.prepare(small())
    return [
        all(one is two for one, two in zip(optimizer.param_groups[0]["params"], before, strict=True)),
        users.param_groups[0]["params"][0] is mine,
        type(before[0]) is nn.Parameter,
    ]


def test_parameters_of_others_are_left_alone():
    assert run_ranks(strangers, 2) == [[True, True, True]] * 2


def refused() -> list[str]:
    texts = []
    for make in (torch.optim.LBFGS, torch.optim.SparseAdam):
        own = accelerator()
        model = small()
        with pytest.raises(ValueError, match="cannot update parameters that are divided") as caught:
            own.prepare(model, make(model.parameters()))
        texts.append(str(caught.value))
        own.free_memory()
    own = accelerator()
    model = small()
    head = nn.Linear(3, 1)
    actor, critic = nn.Sequential(model, head), nn.Sequential(model, nn.Linear(3, 1))
    own.prepare(actor)
    with pytest.raises(ValueError, match="divided in part") as caught:
        own.prepare(critic)
    return [*texts, str(caught.value)]


def test_what_cannot_work_says_so_when_it_is_prepared():
    for dense, sparse, shared in run_ranks(refused, 2):
        assert "LBFGS" in dense
        assert "one vector of all parameters" in dense
        assert "sparse gradients" in sparse
        assert "1.weight" in shared
        assert "prepare one module that holds both" in shared


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


MAKERS = {"adafactor": adafactor, "fused": fused}


def overflow(kind: str, rank: int) -> tuple[list[bool], list[bool]]:
    scaling = GradScalerKwargs(init_scale=1024.0)
    plugin = FullyShardedDataParallelPlugin()
    own = Accelerator(cpu=True, mixed_precision="fp16", fsdp_plugin=plugin, kwargs_handlers=[scaling])
    model = small()
    model, optimizer = own.prepare(model, MAKERS[kind](model.parameters()))
    stayed, skipped = [], []
    for bad in (True, False):
        own.backward(model(batch(own.process_index, 0)).square().mean())
        if bad and own.process_index == rank:
            model[0].weight.grad.to_local().fill_(float("inf"))
        before = whole(list(model.parameters()))
        optimizer.step()
        stayed.append(all(map(torch.equal, before, whole(list(model.parameters())))))
        skipped.append(own.optimizer_step_was_skipped)
        optimizer.zero_grad()
    return stayed, skipped


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_an_overflow_is_skipped(kind, rank):
    assert run_ranks(overflow, 2, kind, rank) == [([True, False], [True, False])] * 2


# ---- several models ----


def gan_round(step: int, rank: int, maker: Any, critic: Any, backward: Any, optimizers: tuple[Any, Any]) -> None:
    noise = batch(rank, step)
    real = batch(rank, step + 50)
    backward(critic(maker(noise).detach()).mean() - critic(real).mean())
    optimizers[1].step()
    optimizers[1].zero_grad()
    backward(-critic(maker(noise)).mean())
    optimizers[0].step()
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()


def maker_and_critic() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)), small(4)


def gan(apart: bool) -> list[Tensor]:
    maker, critic = maker_and_critic()
    optimizers: tuple[Any, Any] = adafactor(maker.parameters()), adamw(critic.parameters())
    first = accelerator(reshard_after_forward=False)
    second = accelerator(min_num_params=10, auto_wrap_policy="size_based_wrap") if apart else first
    maker, critic = first.prepare(maker), second.prepare(critic)
    optimizers = first.prepare(optimizers[0]), second.prepare(optimizers[1])
    if apart:
        plans = [str(own.explain(model)) for own, model in ((first, maker), (second, critic))]
        assert ["chosen" in plan for plan in plans] == [False, True]
        assert first.is_fsdp2
        assert second.is_fsdp2
    for step in range(3):
        gan_round(step, first.process_index, maker, critic, first.backward, optimizers)
    return whole([*maker.parameters(), *critic.parameters()])


@pytest.mark.parametrize("apart", [False, True])
def test_two_models_take_turns(apart):
    maker, critic = maker_and_critic()
    optimizers = adafactor(maker.parameters()), adamw(critic.parameters())
    noise = [torch.cat([batch(rank, step) for rank in range(2)]) for step in range(100)]
    for step in range(3):
        (critic(maker(noise[step]).detach()).mean() - critic(noise[step + 50]).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-critic(maker(noise[step])).mean()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    expected = whole([*maker.parameters(), *critic.parameters()])
    for found in run_ranks(gan, 2, apart):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def distillation(replicated: bool) -> list[Tensor]:
    teacher: Any = small(7).requires_grad_(False)
    student = small(8)
    student_side = accelerator()
    teacher_side = accelerator(**{"sharding_strategy": "NO_SHARD"} if replicated else {"reshard_after_forward": False})
    student, optimizer = student_side.prepare(student, muon(split(student)[0]))
    teacher = teacher_side.prepare_model(teacher, evaluation_mode=True)
    assert isinstance(next(iter(teacher.parameters())), DTensor) is not replicated
    for step in range(3):
        inputs = batch(student_side.process_index, step)
        with torch.no_grad():
            wanted = teacher(inputs)
        student_side.backward((student(inputs) - wanted).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return whole(list(student.parameters()))


@pytest.mark.parametrize("replicated", [False, True])
def test_a_teacher_has_a_plan_of_its_own(replicated):
    teacher, student = small(7), small(8)
    optimizer = muon(split(student)[0])
    for step in range(3):
        inputs = torch.cat([batch(rank, step) for rank in range(2)])
        (student(inputs) - teacher(inputs).detach()).square().mean().backward()
        optimizer.step()
        student.zero_grad()
    expected = whole(list(student.parameters()))
    for found in run_ranks(distillation, 2, replicated):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---- checkpoints ----


def resumed(folder: str, kind: str, form: str) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after a run without a break, and after one that was saved and continued by new objects."""
    make = MAKERS[kind]
    own = accelerator(state_dict_type=form)
    model = small()
    model, optimizer = own.prepare(model, make(model.parameters()))
    sharded_steps(own, model, [optimizer], steps=2)
    own.save_state(folder)
    through = sharded_steps(own, model, [optimizer])
    own.free_memory()
    model = small(9)
    model, optimizer = own.prepare(model, make(model.parameters()))
    own.load_state(folder)
    return through, sharded_steps(own, model, [optimizer])


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_run_is_continued(tmp_path, kind, form):
    for through, again in run_ranks(resumed, 2, str(tmp_path / "state"), kind, form):
        torch.testing.assert_close(again, through, rtol=0, atol=0)
