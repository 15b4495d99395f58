import copy
import pickle
from typing import Any

import pytest
import torch

from hasten import Accelerator
from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.settings.handlers import GradScalerKwargs
from hasten.training.accumulation import GradientState
from hasten.training.optimizer import AcceleratedOptimizer
from hasten.weights import successors
from tests.ranks import run_ranks
from tests.simulated_device import install


def make(
    kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> tuple[AcceleratedOptimizer, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(2))
    return AcceleratedOptimizer(kind([parameter], **{"lr": 0.5, **options})), parameter


def fill(parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.ones(2)


# ---- looking through ----


def test_it_is_an_optimizer_and_shows_the_users_own():
    prepared, parameter = make(torch.optim.Adam)
    inner = prepared.optimizer
    assert isinstance(prepared, torch.optim.Optimizer)
    assert prepared.state is inner.state
    assert prepared.param_groups is inner.param_groups
    assert prepared.defaults is inner.defaults
    fill(parameter)
    prepared.step()
    assert prepared.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert "Adam (" in repr(prepared)


def test_what_is_set_on_it_is_set_on_the_users_own():
    prepared, _ = make()
    prepared.param_groups = [{"params": [], "lr": 3.0}]
    prepared.state = {"a": 1}
    prepared.defaults = {"lr": 3.0}
    assert prepared.optimizer.param_groups[0]["lr"] == 3.0
    assert prepared.optimizer.state == {"a": 1}
    assert prepared.optimizer.defaults == {"lr": 3.0}


def test_groups_are_added_and_states_loaded_through_it():
    prepared, parameter = make(momentum=0.9)
    other = torch.nn.Parameter(torch.ones(3))
    prepared.add_param_group({"params": [other], "lr": 0.1})
    assert [group["lr"] for group in prepared.optimizer.param_groups] == [0.5, 0.1]
    fill(parameter)
    prepared.step()
    saved = copy.deepcopy(prepared.state_dict())
    prepared.step()
    prepared.load_state_dict(saved)
    assert torch.equal(prepared.state[parameter]["momentum_buffer"], torch.ones(2))


def test_groups_may_name_parameters_that_have_been_replaced():
    prepared, _ = make()
    old, new, named, newer = (torch.nn.Parameter(torch.ones(size)) for size in (4, 2, 4, 2))
    successors.replace(old, new)
    successors.replace(named, newer)
    followed: list[Any] = []
    prepared.follow = followed.append
    prepared.add_param_group({"params": old, "lr": 0.1})
    assert prepared.param_groups[1]["params"][0] is new
    with pytest.raises(TypeError, match="ordered"):
        prepared.add_param_group({"params": {named}})
    assert followed == [prepared.optimizer]
    inner = torch.optim.SGD([("first", torch.nn.Parameter(torch.ones(1)))], lr=0.1)
    prepared = AcceleratedOptimizer(inner)
    prepared.add_param_group({"params": [("second", named)]})
    assert prepared.param_groups[1]["params"][0] is newer
    assert prepared.param_groups[1]["param_names"] == ["second"]


def test_only_state_that_lives_on_single_ranks_is_divided():
    prepared, _ = make(momentum=0.9)
    prepared.divide_state()
    divided: list[Any] = []
    prepared.optimizer._steps_over = type("Steps", (), {"divide_state": staticmethod(divided.append)})
    prepared.divide_state()
    assert divided == [prepared.optimizer]


def test_hooks_and_what_else_an_optimizer_has_are_reached():
    prepared, parameter = make()
    prepared.optimizer.custom = 7  # type: ignore[attr-defined]
    calls: list[str] = []
    prepared.register_step_pre_hook(lambda *_: calls.append("before"))
    prepared.register_step_post_hook(lambda *_: calls.append("after"))
    prepared.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    fill(parameter)
    prepared.step()
    prepared.state_dict()
    assert calls == ["before", "after", "state"]
    assert prepared.custom == 7
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'missing'"):
        prepared.missing  # noqa: B018


# ---- windows ----


def test_it_acts_only_when_the_window_is_complete():
    state = GradientState.for_accelerator(GradientAccumulationPlugin(num_steps=2))
    prepared, parameter = make()
    values, grads = [], []
    for _ in range(4):
        state.advance()
        fill(parameter)
        prepared.step()
        prepared.zero_grad()
        values.append(parameter[0].item())
        grads.append(parameter.grad is not None)
    assert values == [1.0, 0.5, 0.5, 0.0]
    assert grads == [True, False, True, False]


def test_it_obeys_the_state_that_it_was_given():
    own = GradientState.for_accelerator(GradientAccumulationPlugin())
    newest = GradientState.for_accelerator(GradientAccumulationPlugin(num_steps=2))
    newest.advance()
    parameter = torch.nn.Parameter(torch.ones(2))
    prepared = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.5), gradient_state=own)
    fill(parameter)
    prepared.step()
    assert parameter[0].item() == 0.5


def test_closures_run_once_per_step_and_not_inside_a_window():
    state = GradientState.for_accelerator(GradientAccumulationPlugin(num_steps=2))
    prepared, parameter = make()
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        fill(parameter)
        return torch.tensor(5.0)

    state.advance()
    assert prepared.step(closure) is None
    assert calls == []
    state.advance()
    assert prepared.step(closure).item() == 5.0
    assert calls == [1]
    assert parameter[0].item() == 0.5


class WithoutSetToNone(torch.optim.SGD):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def test_gradients_are_dropped_unless_asked_to_be_zeroed():
    prepared, parameter = make()
    fill(parameter)
    prepared.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]
    prepared.zero_grad()
    assert parameter.grad is None


def test_an_argument_that_an_optimizer_does_not_know_is_refused():
    prepared, parameter = make(WithoutSetToNone)
    fill(parameter)
    with pytest.raises(ValueError, match=r"WithoutSetToNone.zero_grad does not take `set_to_none`; call it without"):
        prepared.zero_grad(set_to_none=True)
    prepared.zero_grad()
    assert parameter.grad is None


class Modes(torch.optim.SGD):
    mode = ""

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_modes_reach_schedule_free_optimizers_one_level_deeper_too():
    prepared, _ = make(Modes)
    outer = AcceleratedOptimizer(prepared)
    for one in (prepared, outer):
        for mode in ("train", "eval"):
            getattr(one, mode)()
            assert prepared.optimizer.mode == mode  # type: ignore[attr-defined]
    plain, _ = make()
    plain.train()
    plain.eval()


# ---- fp16 ----


def test_a_scaled_step_with_a_gradient_that_is_not_finite_is_skipped():
    parameter = torch.nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    prepared = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.5), scaler=scaler)
    assert not prepared.step_was_skipped
    scaler.scale(parameter.sum() * float("inf")).backward()
    prepared.step()
    assert prepared.step_was_skipped
    assert parameter.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 4.0
    prepared.zero_grad()
    scaler.scale(parameter.sum()).backward()
    prepared.step()
    assert not prepared.step_was_skipped
    assert parameter.tolist() == [0.5, 0.5]
    assert len(prepared.optimizer._optimizer_step_post_hooks) == 0


def test_a_scaled_step_without_any_gradient_is_one_that_changes_nothing():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    used, idle = accelerator.prepare(*(torch.optim.SGD([parameter], lr=0.5) for parameter in parameters))
    for update in range(1, 3):
        accelerator.backward(parameters[0].sum())
        used.step()
        idle.step()
        assert not idle.step_was_skipped
        used.zero_grad()
        idle.zero_grad()
        assert [parameter.tolist() for parameter in parameters] == [[1.0 - 0.5 * update] * 2, [1.0, 1.0]]
    assert accelerator.scaler.get_scale() == 8.0


def test_a_closure_cannot_be_scaled():
    parameter = torch.nn.Parameter(torch.ones(2))
    prepared = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.5), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(
        ValueError, match=r"SGD.step\(closure\) cannot be combined with fp16.*Use mixed_precision='bf16'"
    ):
        prepared.step(lambda: None)


# ---- copies ----


def test_it_pickles_with_its_state():
    prepared, parameter = make(torch.optim.Adam)
    fill(parameter)
    prepared.step()
    again = pickle.loads(pickle.dumps(prepared))
    assert type(again) is AcceleratedOptimizer
    assert torch.equal(again.param_groups[0]["params"][0], parameter)
    assert again.gradient_state.sync_gradients
    fill(again.param_groups[0]["params"][0])
    again.step()
    assert again.state_dict()["state"][0]["step"].item() == 2
    assert prepared.state_dict()["state"][0]["step"].item() == 1


def test_it_pickles_although_a_scheduler_watches_it():
    prepared, parameter = make()
    scheduler = torch.optim.lr_scheduler.StepLR(prepared, 1, gamma=0.1)
    again = pickle.loads(pickle.dumps(prepared))
    fill(again.param_groups[0]["params"][0])
    again.step()
    assert again.param_groups[0]["params"][0].tolist() == [0.5, 0.5]
    fill(parameter)
    prepared.step()
    scheduler.step()
    assert parameter.tolist() == [0.5, 0.5]
    assert prepared.param_groups[0]["lr"] == pytest.approx(0.05)


def test_it_can_be_copied():
    prepared, parameter = make()
    again = copy.deepcopy(prepared)
    fill(again.param_groups[0]["params"][0])
    again.step()
    assert parameter.tolist() == [1.0, 1.0]


# ---- devices ----


def place() -> list[Any]:
    install("npu")
    module = torch.nn.Linear(2, 1, bias=False)
    parameter = module.weight
    optimizer = torch.optim.Adam([parameter], lr=0.5)
    module(torch.ones(2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    module.to("npu")
    kept = AcceleratedOptimizer(optimizer, device_placement=False)
    before = kept.state[parameter]["exp_avg"].device.type
    state = AcceleratedOptimizer(optimizer).state[parameter]
    return [before, state["exp_avg"].device.type, state["exp_avg_sq"].device.type, state["step"].device.type]


def test_state_that_exists_goes_where_the_parameters_are():
    assert run_ranks(place, 1, fresh=True, initialise=False) == [["cpu", "npu", "npu", "cpu"]]


def test_state_that_is_in_its_place_is_not_copied():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.5)
    fill(parameter)
    optimizer.step()
    moment = optimizer.state[parameter]["exp_avg"]
    assert AcceleratedOptimizer(optimizer).state[parameter]["exp_avg"] is moment
