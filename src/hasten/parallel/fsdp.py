"""The settings of sharding as other libraries know them, and what they mean for a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from hasten.parallel import words
from hasten.parallel.recompute import Recompute
from hasten.parallel.shard import Sharding
from hasten.parallel.units import Choose, by_class, by_size
from hasten.settings import environment, export
from hasten.settings.schema import BY_NAME
from hasten.settings.values import FALSE, TRUE
from hasten.world.context import CONTEXT

_logger = logging.getLogger(__name__)

# Fields whose settings have other names.
_SETTINGS = {
    "cpu_offload": "fsdp_offload_params",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}


@dataclass
class FullyShardedDataParallelPlugin:
    """How the parameters of prepared models are divided over the ranks.

    A field of None is read from its environment variable, `FSDP_<FIELD>`, which a flag or a file of `hasten launch` may have set,
    else it has its default.

    There is one engine, torch's `fully_shard` (version 2). Settings of version 1 are translated, which is said once, and
    `fsdp_version` is 2 from then on.

    Args:
        fsdp_version: 1 or 2.
        sharding_strategy: of version 1: FULL_SHARD, SHARD_GRAD_OP (as `reshard_after_forward=False`), HYBRID_SHARD (parameters are
            divided within each machine and copied between machines), HYBRID_SHARD_ZERO2 or NO_SHARD.
        reshard_after_forward: free whole parameters after the forward pass and gather them again for the backward pass: less
            memory, more communication. True by default; an integer keeps them in shards of so many ranks.
        mixed_precision_policy: a torch `MixedPrecisionPolicy`, "bf16" or "fp16", or a dictionary with its three formats; by
            default the Accelerator's precision.
        auto_wrap_policy: which modules are gathered together: "transformer_based_wrap" (by class), "size_based_wrap", "no_wrap"
            (the model as a whole) or a function of a module; by default the model's own `_no_split_modules`, if it has them.
        transformer_cls_names_to_wrap: the classes, as a list or with commas (`FSDP_TRANSFORMER_CLS_TO_WRAP`).
        min_num_params: the size for "size_based_wrap", which it chooses if nothing else does.
        cpu_offload: True or a torch policy: keep shards on the CPU (`FSDP_OFFLOAD_PARAMS`).
        ignored_modules: modules that every rank keeps whole, or a pattern that their whole names match.
        forward_prefetch: gather so many units ahead in the forward pass; True for one.
        backward_prefetch: torch's own choice is always in effect; an integer gathers so many units ahead.
        state_dict_type: FULL_STATE_DICT or SHARDED_STATE_DICT: the form of checkpoints, see docs/checkpoints.md.
        sharded_save: "dcp" (the default): SHARDED_STATE_DICT is written by torch's distributed checkpoint and loads on any number
            of ranks; "per_rank": each rank writes and reads its own file without any exchange, and the checkpoint loads on the same
            number of ranks and mesh only.
        sync_module_states: every rank begins with the values that the first one has, if it has any.
        use_orig_params, limit_all_gathers: of version 1; without effect, since version 2 does what they ask.
        activation_checkpointing: layers keep their input only and run again in the backward pass. True for all layers (the
            outermost that the policy chooses), an integer n for every n-th, or operations whose results are kept all the same (a
            list or a policy, see `torch.utils.checkpoint.create_selective_checkpoint_contexts`).
        activation_checkpointing_offload: and these inputs are kept in the memory of the host.
        cpu_ram_efficient_loading: only the first process has (or loads) the values of a model; each other one gets its shards of
            them, and may have its model on the meta device.
        param_init_fn: gives memory and values to each module that is on the meta device, unit by unit, so that no more than one
            is whole at a time. Each process must draw the same random numbers.
        state_dict_config, optim_state_dict_config: torch's, as the type has them: whole tensors come to the CPU of rank 0, shards
            to the CPU of each.

    Raises:
        ValueError: a value is not legal; the message says which are.
        NotImplementedError: a setting that is not built yet.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: Any = None
    activation_checkpointing: Any = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None
    sharded_save: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._layout = words.EVERYWHERE
        self.fsdp_version = self._version()
        self._choose_loading()
        self._choose_recomputation()
        self._choose_strategy()
        self._choose_state_dict_type()
        self.sharded_save = self._sharded_save()
        self.cpu_offload = self._offload()
        self._choose_policy()
        self.ignored_modules = self._given("ignored_modules")
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = words.precision_policy(self.mixed_precision_policy)
        self._prefetch = (self._ahead("forward_prefetch"), self._ahead("backward_prefetch"))
        self.forward_prefetch = self.backward_prefetch = None
        self._synchronises = bool(self._flag("sync_module_states"))
        self.use_orig_params = self.sync_module_states = None
        if self.fsdp_version == 1:
            self._become_version_2()

    # -- reading the fields ------------------------------------------------------------------------------------------

    def _version(self) -> int:
        given = self._given("fsdp_version")
        if given is None:
            return self._version_of_words()
        if str(given) not in ("1", "2"):
            raise ValueError(f"fsdp_version={given!r}: allowed are 1 and 2.")
        return int(given)

    def _version_of_words(self) -> int:
        """The version in whose words a strategy is given: by an argument, else by a variable."""
        if self.sharding_strategy is not None or words.names_strategy(self.reshard_after_forward):
            return 1
        if self.reshard_after_forward is not None:
            return 2
        old = self._given("sharding_strategy") is not None or words.names_strategy(self._given("reshard_after_forward"))
        return 1 if old else 2

    def _choose_loading(self) -> None:
        setting = setting_of("cpu_ram_efficient_loading")
        given = self.cpu_ram_efficient_loading is not None
        if not given:  # what another plugin has told is not a setting of this one
            said = environment.get(setting, {BY_NAME[setting].env: export.said(setting) or ""})
            self.cpu_ram_efficient_loading = bool(said)
        else:
            self.cpu_ram_efficient_loading = bool(self._flag("cpu_ram_efficient_loading"))
        if given or export.is_told(setting):  # what reads the weights looks at the environment
            export.tell(setting, self.cpu_ram_efficient_loading)

    def _choose_recomputation(self) -> None:
        given = self._given("activation_checkpointing")
        if given is None or isinstance(given, (bool, str)):
            given = bool(self._flag("activation_checkpointing"))
        elif isinstance(given, int) and given < 1:
            raise ValueError(f"activation_checkpointing={given}: every n-th layer, so n must be at least 1.")
        self.activation_checkpointing = given
        self.activation_checkpointing_offload = bool(self._flag("activation_checkpointing_offload"))
        if not self.activation_checkpointing_offload:
            return
        if not self.activation_checkpointing:
            raise ValueError("`activation_checkpointing_offload=True` requires `activation_checkpointing=True`.")
        if self.fsdp_version == 1:
            raise ValueError("`activation_checkpointing_offload=True` is only supported with `fsdp_version=2`.")

    def recomputation(self) -> Recompute | None:
        """The transform that makes layers run again; None if they keep what they compute."""
        given = self.activation_checkpointing
        if given is False:
            return None
        if isinstance(given, int):
            return Recompute(self.choose, int(given), offload=bool(self.activation_checkpointing_offload))
        return Recompute(self.choose, keep=given, offload=bool(self.activation_checkpointing_offload))

    def _given(self, name: str) -> Any:
        """A field as it was given, else the value of its environment variable; None if nobody set it."""
        value = getattr(self, name)
        return environment.get(setting_of(name)) if value is None else value

    def _flag(self, name: str) -> bool | None:
        """A field that is true or false, from Python, as text or from the environment; None if nobody set it."""
        given = self._given(name)
        if given is None or isinstance(given, bool):
            return given
        if str(given).lower() in (*TRUE, *FALSE):
            return str(given).lower() in TRUE
        raise ValueError(f"{name}={given!r}: allowed are true and false.")

    def _choose_strategy(self) -> None:
        given, frees = self._strategy_of_version()
        if words.names_strategy(frees):
            if self.fsdp_version == 2:
                raise ValueError(
                    f"reshard_after_forward set to {frees}. This is not supported with FSDP2, please set to a `bool`, or an "
                    "integer for shards of so many ranks."
                )
            given, frees = frees, None
        elif frees is not None and self.fsdp_version == 1:
            raise ValueError(
                f"reshard_after_forward set to {frees}. This is not supported with FSDP1, please set to a `str` or an instance of "
                "`torch.distributed.fsdp.ShardingStrategy`, or use `fsdp_version=2`."
            )
        if given is not None and self.fsdp_version == 2:
            raise ValueError(
                f"sharding_strategy={given!r} is a setting of version 1. With fsdp_version=2 set `reshard_after_forward` to a "
                "`bool` (False is SHARD_GRAD_OP), and `ParallelismConfig(dp_replicate_size=...)` for copies."
            )
        self.sharding_strategy = None
        if given is not None:
            self.reshard_after_forward, self._layout = words.STRATEGIES[words.strategy(given)]
        elif isinstance(frees, int):
            self.reshard_after_forward = frees
        else:
            self.reshard_after_forward = True if frees is None else self._flag("reshard_after_forward")

    def _strategy_of_version(self) -> tuple[Any, Any]:
        """`sharding_strategy` and `reshard_after_forward`, without a variable in words of the other version.

        Launchers write the variables of both.
        """
        given, frees = self._given("sharding_strategy"), self._given("reshard_after_forward")
        if self.fsdp_version == 2 and self.sharding_strategy is None and given is not None:
            if given != "FULL_SHARD" and words.STRATEGIES[words.strategy(given)] != (
                frees is not False,
                words.EVERYWHERE,
            ):
                _without_effect("FSDP_SHARDING_STRATEGY", given, 2, "FSDP_RESHARD_AFTER_FORWARD")
            given = None
        if self.fsdp_version == 1 and self.reshard_after_forward is None and isinstance(frees, int):
            if frees is not True and (given is None or words.STRATEGIES[words.strategy(given)][0]):
                _without_effect("FSDP_RESHARD_AFTER_FORWARD", str(frees).lower(), 1, "FSDP_SHARDING_STRATEGY")
            frees = None
        return given, frees

    def _choose_state_dict_type(self) -> None:
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        given = self.state_dict_config, self.optim_state_dict_config
        self.set_state_dict_type(self._given("state_dict_type") or default)
        for config, own in zip(given, (self.state_dict_config, self.optim_state_dict_config), strict=True):
            if config is not None and config != own:
                raise ValueError(f"{config} can not be obeyed: with {self.state_dict_type.name} it is {own}.")

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how a model is saved from now on.

        Raises:
            ValueError: an unknown type, or LOCAL_STATE_DICT, which only version 1 has.
        """
        given = self.state_dict_type if state_dict_type is None else state_dict_type
        kinds = {kind.name: kind for kind in StateDictType}
        kinds |= {str(kind.value): kind for kind in StateDictType}
        kind = given if isinstance(given, StateDictType) else kinds.get(str(given).upper())
        if kind is None or kind is StateDictType.LOCAL_STATE_DICT:
            raise ValueError(
                f"FSDP2 does not support {given}. Please set `fsdp_state_dict_type` to `SHARDED_STATE_DICT` or `FULL_STATE_DICT`."
            )
        self.state_dict_type = kind
        self.state_dict_config, self.optim_state_dict_config = words.CONFIGS[kind]

    def _sharded_save(self) -> str:
        given = self._given("sharded_save")
        word = "dcp" if given is None else str(given).lower()
        if word not in ("dcp", "per_rank"):
            raise ValueError(
                f"sharded_save={given!r}: allowed are 'dcp' (checkpoints load on any number of processes) and 'per_rank' (each "
                "process has its own file; they load on the same number and mesh only)."
            )
        if word == "per_rank" and self.state_dict_type is StateDictType.FULL_STATE_DICT:
            raise ValueError(
                "sharded_save='per_rank' has no effect with FULL_STATE_DICT: set state_dict_type='SHARDED_STATE_DICT', too. For a "
                "last save of whole weights call `set_state_dict_type('FULL_STATE_DICT')` then."
            )
        return word

    @property
    def uses_dcp(self) -> bool:
        """Whether sharded models are saved by torch's distributed checkpoint."""
        return self.sharded_save == "dcp"

    def _offload(self) -> OffloadPolicy:
        if isinstance(self.cpu_offload, OffloadPolicy):
            return self.cpu_offload
        if hasattr(self.cpu_offload, "offload_params"):  # version 1's class
            self.cpu_offload = bool(self.cpu_offload.offload_params)
        if self._flag("cpu_offload"):
            return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        return OffloadPolicy()

    def _ahead(self, name: str) -> int:
        """How many units are gathered ahead in one direction."""
        given = self._given(name)
        text = str(getattr(given, "name", given)).lower()
        if given is None or text in ("no_prefetch", "backward_pre", "backward_post"):
            return 0  # torch gathers the next unit early by itself
        if text.isdecimal():
            return int(text)
        if text not in (*TRUE, *FALSE):
            raise ValueError(f"{name}={given!r}: allowed are true, false, and how many units are gathered ahead.")
        return int(text in TRUE)

    def _choose_policy(self) -> None:
        classes, size = self.transformer_cls_names_to_wrap, self.min_num_params
        self._classes = self._class_names()
        self.min_num_params = self._size()
        given = self._given("auto_wrap_policy")
        if given is None and self.min_num_params is not None and not self._classes:
            given = size_based_auto_wrap_policy
        if isinstance(given, str):
            if given.upper() not in words.POLICIES:
                raise ValueError(f"Invalid auto wrap policy: {given}. Must be one of {list(words.POLICIES)}")
            named = {
                "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
                "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
            }
            given = named.get(given.upper(), words.no_wrap)
        elif given is not None and not callable(given):
            raise ValueError(
                f"auto_wrap_policy={given!r}: allowed are {list(words.POLICIES)} and functions of a module."
            )
        self.auto_wrap_policy = given
        self._check_policy(classes, size)

    def _check_policy(self, classes: Any, size: Any) -> None:
        """Refuse arguments that the policy would not look at. Launchers write variables of all policies, which are no mistake."""
        named = {transformer_auto_wrap_policy: "transformer_based_wrap", size_based_auto_wrap_policy: "size_based_wrap"}
        policy = self.auto_wrap_policy
        word = named.get(policy, "no_wrap" if policy is words.no_wrap else "a function") if policy else "by class"
        if classes and word not in ("by class", "transformer_based_wrap"):
            raise ValueError(
                f"transformer_cls_names_to_wrap={classes!r} has no effect with auto_wrap_policy={word!r}. Leave one of them out; "
                "classes are what 'transformer_based_wrap' looks for."
            )
        if size is not None and word != "size_based_wrap":
            other = "transformer_cls_names_to_wrap" if word == "by class" else f"auto_wrap_policy={word!r}"
            raise ValueError(
                f"min_num_params={size} has no effect with {other}. Leave one of them out; sizes are what "
                "'size_based_wrap' looks at."
            )

    def _class_names(self) -> list[str]:
        given = self._given("transformer_cls_names_to_wrap")
        if isinstance(given, str):
            given = [name.strip() for name in given.split(",") if name.strip()]
        self.transformer_cls_names_to_wrap = None if given is None else list(given)
        return list(given or ())

    def _size(self) -> int | None:
        given = self._given("min_num_params")
        if given is None:
            return None
        if isinstance(given, str) and given.isdecimal():
            given = int(given)
        if not isinstance(given, int):
            raise ValueError(f"`min_num_params` must be an integer. Got {given} of type {type(given)}")
        return given

    def _become_version_2(self) -> None:
        self.fsdp_version = 2
        if (CONTEXT.world is None or CONTEXT.world.is_main) and CONTEXT.first_time("FSDP version 1 is translated"):
            _logger.warning(
                "Settings of FSDP version 1 are translated to version 2: whole parameters are %s after the forward pass, and "
                "divided over %s. Use FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=%s) to say the same.",
                "freed" if self.reshard_after_forward else "kept",
                self._layout,
                self.reshard_after_forward,
            )

    # -- what they mean for a model ----------------------------------------------------------------------------------

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute and reduce in this precision, if no policy was given or `override` says so."""
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = (
                None if str(mixed_precision) == "no" else words.precision_policy(mixed_precision)
            )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Look for the classes in this model; kept for libraries that call it.

        Raises:
            ValueError: the model has no module of one of these classes.
        """
        self.choose(model)

    def shards_and_copies(self, size: int, local_size: int) -> tuple[int, int]:
        """Over how many ranks parameters are divided, and how many copies there are of the whole."""
        shards = {words.EVERYWHERE: size, words.MACHINE: local_size, words.NOWHERE: 1}[self._layout]
        return shards, size // shards

    def sharding(self) -> Sharding:
        """What the engine must know."""
        policy = self.mixed_precision_policy or MixedPrecisionPolicy()
        recompute = self.recomputation()
        return Sharding(
            choose=self.choose,
            frees=self.reshard_after_forward,
            precision=policy,
            offload=self.cpu_offload,
            ignored=self.ignored,
            prefetch=self._prefetch,
            upcast=policy.param_dtype not in (None, torch.float32),
            transforms=() if recompute is None else (recompute,),
            from_first=bool(self.cpu_ram_efficient_loading),
            synchronises=self._synchronises,
            initialise=self.param_init_fn,
        )

    def choose(self, model: nn.Module) -> Choose | None:
        """Which modules of a model are gathered together; None for the model as a whole."""
        policy = self.auto_wrap_policy
        if policy is words.no_wrap:
            return None
        if policy is size_based_auto_wrap_policy:
            least = words.DEFAULT_SIZE if self.min_num_params is None else self.min_num_params
            return by_size(model, least) if least > 0 else None
        if policy is None or policy is transformer_auto_wrap_policy:
            names = self._classes or words.own_classes(model)
            if not names:
                self._warn_of_one_unit(model)
            return by_class(model, names) if names else None
        return words.function(policy)

    def _warn_of_one_unit(self, model: nn.Module) -> None:
        world, kind, layers = CONTEXT.world, type(model).__name__, words.repeated_classes(model)
        if not layers or (world is not None and (not world.is_main or world.size == 1)):
            return
        if CONTEXT.first_time(f"{kind} is one unit"):
            _logger.warning(
                "No layers of %s were chosen, so all its parameters are gathered at once, and each process needs memory for the "
                "whole model in every pass. Name the classes of its layers (it has several of %s): "
                "FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=%r). If that is what you want: "
                'auto_wrap_policy="no_wrap".',
                kind,
                ", ".join(layers),
                layers,
            )

    def ignored(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that every rank keeps whole."""
        given = self.ignored_modules
        if given is None:
            return set()
        if isinstance(given, str):
            pattern = re.compile(given)
            given = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
            if not given and (CONTEXT.world is None or CONTEXT.world.is_main):
                kind = type(model).__name__
                _logger.warning("ignored_modules=%r matches the whole name of no module of %s.", pattern.pattern, kind)
        return {parameter for module in given for parameter in module.parameters()}


def setting_of(field: str) -> str:
    """The setting (see `hasten.settings.schema`) from which a field is read that was not given."""
    return _SETTINGS.get(field, field if field.startswith("fsdp_") else f"fsdp_{field}")


def _without_effect(variable: str, value: Any, version: int, instead: str) -> None:
    if CONTEXT.first_time(f"{variable} has no effect"):
        _logger.warning(
            "%s=%s has no effect, since it is not in the words of FSDP version %d, which is in use. Set %s instead, or another "
            "FSDP_VERSION.",
            variable,
            value,
            version,
            instead,
        )
