"""The table of everything that the user may set; parser, environment, files, help and docs are derived from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from hasten.settings.enums import DynamoBackend, PrecisionType

# Who obeys a setting.
WORKER = "worker"  # exported to every process of the job and read there
LAUNCHER = "launcher"  # only `hasten launch` reads it
ELASTIC = "elastic"  # obeyed by torch.distributed.run, which is started when it (or several machines) is asked for

GENERAL = "General"
HARDWARE = "Hardware"
PROCESSES = "Processes"
MACHINES = "Several machines, restarts and logs"
TRAINING = "Precision and accumulation"
COMPILE = "Compilation (torch.compile)"
SHARDING = "Sharding (FSDP)"
LIBRARY = "Library, by environment variable alone"


class Setting(NamedTuple):
    """One thing that the user may set.

    A name is the same in Python and in the parsed command line's destination, unless the first flag differs from it.

    Attributes:
        name: its name in Python.
        kind: how its text is read; see `hasten.settings.values`.
        group: heading under which help and docs list it.
        help: one sentence, without a full stop.
        applies: who obeys it: WORKER, LAUNCHER or ELASTIC.
        flags: spellings on the command line with underscores; hyphens are accepted too. The first one is shown.
        env: environment variable; "" if there is none.
        key: dotted key in a configuration file; "" if a file cannot set it.
        old_keys: other dotted keys under which older files hold it.
        default: value when nobody sets it.
        choices: legal values of a "choice", in any case; names that an "amount" may be.
        old_values: other spellings in older files, each with the choice that it means.
        low, high: inclusive bounds of numbers.
        excludes: settings that contradict it when both come from the command line.
        always: exported to the workers even at its default, as the reference does.
        needs: the setting that must be on for this one to have an effect.
    """

    name: str
    kind: str
    group: str
    help: str
    applies: str = WORKER
    flags: tuple[str, ...] = ()
    env: str = ""
    key: str = ""
    old_keys: tuple[str, ...] = ()
    default: Any = None
    choices: tuple[str, ...] = ()
    old_values: tuple[tuple[str, str], ...] = ()
    low: float | None = None
    high: float | None = None
    excludes: tuple[str, ...] = ()
    always: bool = False
    needs: str = ""

    @property
    def dest(self) -> str:
        """Attribute that holds it in a parsed command line."""
        return self.flags[0].lstrip("-") if self.flags else self.name


def _dynamo(part: str, kind: str, help: str, **more: Any) -> Setting:
    """A row of torch.compile's group, whose names all follow one pattern."""
    name = f"dynamo_{part}"
    return Setting(
        name, kind, COMPILE, help, WORKER, (f"--{name}",), f"ACCELERATE_{name.upper()}", f"dynamo_config.{name}",
        (name, f"dynamo_config.{part}"), always=True, **more,
    )  # fmt: skip


def _fsdp(part: str, kind: str, help: str, env: str = "", old: tuple[str, ...] = (), **more: Any) -> Setting:
    """A row of the group of sharding; files hold it in their section `fsdp_config`."""
    name = f"fsdp_{part}"
    old_keys = tuple(f"fsdp_config.{key}" for key in (part, *old))
    return Setting(
        name, kind, SHARDING, help, WORKER, (f"--{name}",), env or f"FSDP_{part.upper()}", f"fsdp_config.{name}",
        old_keys, needs="use_fsdp", **more,
    )  # fmt: skip


def _own(name: str, kind: str, group: str, help: str, **more: Any) -> Setting:
    """A row of the launcher, whose flag, variable and key are spelled as its name."""
    row = {"applies": LAUNCHER, "flags": (f"--{name}",), "env": f"HASTEN_{name.upper()}", "key": name, **more}
    return Setting(name, kind, group, help, **row)


def _variable(name: str, kind: str, env: str, help: str, **more: Any) -> Setting:
    """A row that only an environment variable sets."""
    return Setting(name, kind, LIBRARY, help, env=env, **more)


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STRATEGY_NUMBERS = tuple((str(number), name) for number, name in enumerate(_STRATEGIES, 1))

TABLE: tuple[Setting, ...] = (
    _own("config_file", "path", GENERAL, "Configuration file (YAML or JSON) to take unset values from", key=""),
    _own("no_config", "bool", GENERAL, "Ignore the default configuration file", key="", default=False,
         excludes=("config_file",)),
    _own("quiet", "bool", GENERAL, "Print no failure report and no notes", flags=("--quiet", "-q"), default=False),
    _own("module", "bool", GENERAL, "The script is the name of a module, run as `python -m` does",
         flags=("--module", "-m"), env="", key="", default=False, excludes=("no_python",)),
    _own("no_python", "bool", GENERAL, "The script is a program of its own: do not put `python` before it",
         env="", key="", default=False, excludes=("module", "as_accelerate")),
    _own("as_accelerate", "bool", GENERAL, "Let `import accelerate` in the script resolve to hasten", key="",
         default=False, excludes=("no_python",)),
    _own("grace_period", "float", GENERAL,
         "Seconds that the processes get to finish after Ctrl-C, SIGTERM or SIGHUP before they are killed",
         default=10.0, low=0),
    Setting("debug", "bool", GENERAL, "Check that all ranks agree on the shapes of every collective operation",
            WORKER, ("--debug",), "ACCELERATE_DEBUG_MODE", "debug", default=False),
    Setting("use_cpu", "bool", HARDWARE, "Run on the CPU even if there is an accelerator", WORKER, ("--cpu",),
            "ACCELERATE_USE_CPU", "use_cpu", default=False, excludes=("multi_gpu", "gpu_ids"), always=True),
    _own("multi_gpu", "bool", HARDWARE,
         "Several processes, one per accelerator (the default); without an accelerator: --num_processes CPU processes",
         env="", key="", default=False, excludes=("use_cpu",)),
    _own("gpu_ids", "names", HARDWARE, "Accelerators of this machine to use, such as 0,2, or `all`"),
    _own("num_processes", "int", PROCESSES,
         "Processes of the whole job; default: one per accelerator, or 1 without accelerators", low=1),
    _own("num_cpu_threads_per_process", "ints", PROCESSES,
         "CPU threads per process; default: torch's choice for one process, else cores / processes of this machine",
         applies=WORKER, env="OMP_NUM_THREADS", low=1),
    _own("num_machines", "range", MACHINES, "Machines of the job: a number, or `fewest:most` for an elastic job",
         default=(1, 1), low=1),
    _own("machine_rank", "int", MACHINES, "Number of this machine, from 0", low=0),
    _own("main_process_ip", "str", MACHINES, "Address of the machine with rank 0"),
    _own("main_process_port", "int", MACHINES, "Port on the machine with rank 0; 0 or unset on one machine: a free one",
         low=0, high=65535),
    _own("same_network", "bool", MACHINES,
         "Taken from accelerate and without effect: the machines find each other by the address either way",
         applies=ELASTIC, default=False),
    _own("rdzv_backend", "choice", MACHINES, "How machines find each other; elastic jobs need c10d or etcd",
         applies=ELASTIC, default="static", choices=("static", "c10d", "etcd", "etcd-v2")),
    _own("rdzv_id", "str", MACHINES, "Name of the job, the same on all machines", applies=ELASTIC, default="none"),
    _own("rdzv_conf", "pairs", MACHINES, "More rendezvous options: key=value,key=value", applies=ELASTIC, default=()),
    _own("max_restarts", "int", MACHINES, "How often all processes are started again after a failure", applies=ELASTIC,
         default=0, low=0),
    _own("monitor_interval", "float", MACHINES, "Seconds between two looks at the processes", applies=ELASTIC,
         default=0.1, low=0.001),
    _own("tee", "streams", MACHINES, "Streams written to log files as well: 0 none, 1 stdout, 2 stderr, 3 both",
         applies=ELASTIC, flags=("--tee", "-t"), default="0"),
    _own("log_dir", "path", MACHINES, "Directory of the log files", applies=ELASTIC),
    _own("role", "str", MACHINES, "Name of the processes' role in torch.distributed.run", applies=ELASTIC,
         default="default"),
    Setting("mixed_precision", "choice", TRAINING, "Precision of the forward pass", WORKER, ("--mixed_precision",),
            "ACCELERATE_MIXED_PRECISION", "mixed_precision", default="no", choices=tuple(PrecisionType.list()),
            always=True),
    Setting("gradient_accumulation_steps", "int", TRAINING, "Micro-batches per optimizer update", WORKER,
            ("--gradient_accumulation_steps",), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "gradient_accumulation_steps", default=1, low=1),
    _dynamo("backend", "choice", "Compile prepared models with this backend (not built yet, nor are the next four)", default="NO",
            choices=tuple(DynamoBackend.list())),
    _dynamo("mode", "choice", "How hard the compiler tries", default="default",
            choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
    _dynamo("use_fullgraph", "bool", "Fail instead of breaking a model into several graphs", default=False),
    _dynamo("use_dynamic", "bool", "Trace with dynamic shapes", default=False),
    _dynamo("use_regional_compilation", "bool", "Compile each repeated block once instead of the whole model",
            default=False),
    Setting("use_fsdp", "bool", SHARDING, "Divide parameters over the processes, as the settings below say", WORKER,
            ("--use_fsdp",), "ACCELERATE_USE_FSDP", "use_fsdp", default=False),
    _fsdp("version", "int", "Version of FSDP in whose words the other settings are written; default: 2, or 1 if they are its own",
          low=1, high=2),
    _fsdp("reshard_after_forward", "amount",
          "Free whole parameters after the forward pass (the default); a number keeps shards over so many processes; version 1 "
          "takes a strategy", low=1, choices=_STRATEGIES),
    _fsdp("sharding_strategy", "choice", "Of version 1, and translated: what is divided, and over which processes",
          choices=_STRATEGIES, old_values=(*_STRATEGY_NUMBERS, ("_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"))),
    _fsdp("auto_wrap_policy", "choice", "How the modules are found that are gathered together",
          choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    _fsdp("transformer_layer_cls_to_wrap", "names",
          "Classes of the modules that are gathered together; default: those that a model names itself",
          env="FSDP_TRANSFORMER_CLS_TO_WRAP"),
    _fsdp("min_num_params", "int", "Parameters of a module that size_based_wrap chooses; default: 100000000", low=0),
    _fsdp("ignored_modules", "str", "Modules that every process keeps whole: a pattern that their names match"),
    _fsdp("offload_params", "truth", "Keep shards and gradients in the memory of the host", default=False),
    _fsdp("activation_checkpointing", "amount",
          "Layers keep their input only and run again in the backward pass; a number n: every n-th layer", default=False, low=1),
    _fsdp("activation_checkpointing_offload", "truth", "Keep these inputs in the memory of the host", default=False),
    _fsdp("state_dict_type", "choice", "How a model is saved; default: sharded_state_dict (version 1: full_state_dict)",
          choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
          old_values=(("1", "FULL_STATE_DICT"), ("3", "SHARDED_STATE_DICT"))),
    _fsdp("sharded_save", "choice", "How sharded_state_dict is written: dcp loads on any number of processes; per_rank exchanges "
          "nothing, and loads on the same number and mesh only", default="dcp", choices=("dcp", "per_rank")),
    _fsdp("cpu_ram_efficient_loading", "truth", "Only rank 0 reads a model's weights, the others get them from it",
          default=False),
    _fsdp("forward_prefetch", "amount", "Gather so many modules ahead in the forward pass; true: one", default=False, low=0),
    _fsdp("backward_prefetch", "amount", "Gather so many modules ahead in the backward pass; names are of version 1, and torch's "
          "own choice", old=("fsdp_backward_prefetch_policy", "backward_prefetch_policy"), low=0,
          choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")),
    _fsdp("use_orig_params", "truth", "Of version 1 and without effect: parameters always stay as they are"),
    _fsdp("sync_module_states", "truth", "All processes begin with the weights that rank 0 has, if it has any"),
    _variable("torch_device", "str", "ACCELERATE_TORCH_DEVICE", "Device to use, such as cuda:1, instead of the found one"),
    _variable("bypass_device_map", "bool", "ACCELERATE_BYPASS_DEVICE_MAP",
              "Prepare a model that a device map has spread, in a distributed job", default=False),
    _variable("fork_launched", "bool", "FORK_LAUNCHED", "Set in processes that a notebook launcher started", default=False),
    _variable("home", "path", "HASTEN_HOME", "Folder of config.yaml and of what hasten keeps; default: ~/.cache/hasten"),
    _variable("launch_id", "str", "HASTEN_LAUNCH_ID",
              "Set by `hasten launch`: marks its processes, so that none outlives it"),
)  # fmt: skip

BY_NAME: dict[str, Setting] = {row.name: row for row in TABLE}
