"""Load models and tokenizers by name: a folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the hub.

Every failure is one sentence. Code that a model folder brings along is never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.chat.tokens import Chat
from agentrl.engines.base import HISTORY_MB
from agentrl.engines.processor import avoid_broken_amx
from agentrl.engines.transformers import TransformersEngine, with_float32_output
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_RANDOM = re.compile("dropout|pdrop|layerdrop|jitter_noise")
"""Fields of a configuration or a module that make a forward pass in training random."""
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""With trust_remote_code left open, transformers asks on stdin whether to run a folder's code."""
_OTHER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def find_model(name: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model: the given one, or the local cache of a hub model.

    A hub model that is not cached is downloaded; without `weights`, only its small files.
    """
    folder = Path(name)
    if not str(name).strip():
        raise ConfigError(
            "the name of the model is empty: give a folder, or a name on the hub, as in"
            " hf:Qwen/Qwen3-0.6B"
        )
    if folder.is_dir():
        return folder
    hub = _HUB_NAME.fullmatch(str(name))
    if hub is None or folder.exists():
        raise ConfigError(
            f"model folder {folder} does not exist: give the path of a Hugging Face model folder,"
            " or a name on the hub, as in Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@main"
        )
    return _from_hub(hub[1], hub[2], weights)


def _from_hub(repo: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        cached = None
    wanted = _WEIGHTS if weights else _TOKENIZER
    if cached and any(path for kind in wanted for path in cached.glob(kind)):
        return cached
    try:
        # One request without retries fails at once if there is no network.
        info = HfApi().model_info(repo, revision=revision, timeout=10)
        names = [file.rfilename for file in info.siblings or ()]
        kind = _WEIGHTS[0 if any(name.endswith(".safetensors") for name in names) else 1]
        patterns = [*_OTHER_FILES, *([kind] if weights else [])]
        return Path(snapshot_download(repo, revision=info.sha, allow_patterns=patterns))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        version = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"model {repo!r} is not a folder, not in the Hugging Face cache and cannot be"
            f" downloaded ({type(error).__name__}: {why}): run `hf download {repo}{version}` where"
            " there is a network, or give the path of a folder"
        ) from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model."""
    folder = find_model(path, weights=False)
    if not any((folder / name).is_file() for name in _TOKENIZER):
        raise ConfigError(
            f"model folder {folder} has no tokenizer: save one there with"
            " tokenizer.save_pretrained()"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with _readable(folder, "tokenizer"):
        # In a Qwen2 folder, AutoTokenizer would silently give a generic tokenizer Qwen2's own way
        # of cutting words.
        loader: Any = PreTrainedTokenizerFast if _is_generic(folder) else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, **_LOCAL)
    return tokenizer


def refuse_other_tokenizer(policy: str | Path, other: str | Path, setting: str) -> None:
    """Refuse a model whose tokens have other ids; a folder without a tokenizer is accepted.

    Args:
        setting: the setting that names the other model.
    """
    if not any((find_model(other, weights=False) / name).is_file() for name in _TOKENIZER):
        return
    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (policy, other))
    if ours != theirs:
        differ = sum(theirs.get(token) != token_id for token, token_id in ours.items())
        raise ConfigError(
            f"{setting}={other}: its tokenizer ({len(theirs)} tokens) is not that of the policy"
            f" {policy}: {differ} of the policy's {len(ours)} tokens have another id there, or"
            " none: give a model with the policy's tokenizer, for example one trained from"
            f" {policy}",
            setting=setting,
        )


def _is_generic(folder: Path) -> bool:
    """Whether tokenizer.json alone describes the folder's tokenizer."""
    config = folder / "tokenizer_config.json"
    if not (config.is_file() and (folder / "tokenizer.json").is_file()):
        return False
    return json.loads(config.read_text()).get("tokenizer_class") in (
        "TokenizersBackend",
        "PreTrainedTokenizerFast",
    )


def load_config(path: str | Path) -> PretrainedConfig:
    """Load the configuration of a model, without its weights."""
    from transformers import AutoConfig

    config: PretrainedConfig = _load(AutoConfig, path)
    return config


def own_dtype(path: str | Path) -> str:
    """The precision of the weights in a model's folder, as in "bfloat16"."""
    return str(load_config(path).get_text_config().dtype or "float32").removeprefix("torch.")


def load_model(
    path: str | Path, device: str = "cpu", *, dropout: float = 0.0, **kwargs: Any
) -> PreTrainedModel:
    """Load a causal language model onto a device; its logits are float32.

    Args:
        dropout: probability wherever the model's family has a dropout, whatever the folder says;
            layers are never dropped, and routers never jittered.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    if not set_dropout(config, dropout) and dropout:
        raise ConfigError(
            f"dropout={dropout}: a {config.model_type} model has none: set it to 0",
            setting="compute.dropout",
        )
    model: PreTrainedModel = _load(AutoModelForCausalLM, path, config=config, **kwargs).to(device)
    set_dropout(model, dropout)
    return with_float32_output(model)


def dropouts(config: PretrainedConfig) -> list[float]:
    """Every dropout probability of a configuration, including nested ones."""
    probabilities = list[float]()
    for name, value in vars(config).items():
        if hasattr(value, "get_text_config"):
            probabilities += dropouts(value)
        elif _is_random(name, value) and "drop" in name and "layerdrop" not in name:
            probabilities.append(float(value))
    return probabilities


def set_dropout(target: PretrainedConfig | PreTrainedModel, probability: float) -> int:
    """Set every dropout of a configuration or a model; returns the number of places.

    This is the only function that decides dropout. Layer drop and router jitter are switched off.
    A configuration is set before its model is built, since some families leave a layer out where
    its dropout is 0. The model is set afterwards, since a head may bring a dropout that no
    configuration names: transformers' token classifiers have 0.1 in front of theirs.
    """
    if not hasattr(target, "modules"):
        return _set_probabilities(target, probability)
    places = _set_probabilities(target.config, probability)
    for module in target.modules():
        if type(module).__name__.startswith("Dropout"):
            module.p = probability
            places += 1
        places += _set_probabilities(module, probability)
    return places


def _set_probabilities(owner: Any, probability: float) -> int:
    places = 0
    for name, value in list(vars(owner).items()):
        if hasattr(value, "get_text_config") and hasattr(owner, "get_text_config"):
            places += _set_probabilities(value, probability)
        elif _is_random(name, value):
            is_dropout = "drop" in name and "layerdrop" not in name
            setattr(owner, name, probability if is_dropout else 0.0)
            places += is_dropout
    return places


def _is_random(name: str, value: object) -> bool:
    return type(value) in (int, float) and bool(_RANDOM.search(name))


def best_device() -> str:
    """The default device: the first CUDA device if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_reward_model(path: str | Path) -> PreTrainedModel:
    """Load a sequence classifier with a trained head onto the best device."""
    from transformers import AutoModelForSequenceClassification

    with _quiet():  # missing weights are reported below
        model, info = _load(AutoModelForSequenceClassification, path, output_loading_info=True)
    heads = getattr(model.config, "reward_heads", 1)  # our ensembles have more than one
    if info["missing_keys"] or model.config.num_labels != heads:
        raise ConfigError(
            f"model folder {path} is no reward model: it needs the weights of a head with"
            f" num_labels=1, not {model.config.num_labels} labels and missing"
            f" {sorted(info['missing_keys'])}"
        )
    classifier: PreTrainedModel = model.to(best_device())
    return classifier


def load_process_reward_model(path: str | Path) -> PreTrainedModel:
    """Load the token classifier of a stage "process_reward" onto the best device."""
    fix = 'give the model of a stage = "process_reward"'
    if not getattr(load_config(path), "process_reward", False):
        raise ConfigError(f"model folder {path} is no process reward model: {fix}")
    from transformers import AutoModelForTokenClassification

    with _quiet():
        model, info = _load(
            AutoModelForTokenClassification, path, dtype="float32", output_loading_info=True
        )
    if info["missing_keys"]:
        raise ConfigError(
            f"model folder {path} is no process reward model: it lacks the weights"
            f" {sorted(info['missing_keys'])}: {fix}"
        )
    classifier: PreTrainedModel = model.to(best_device())
    return classifier


def load_critic(
    path: str | Path, device: torch.device | str = "cpu", *, dropout: float = 0.0
) -> PreTrainedModel:
    """A value model from the folder of a policy, of a reward model, or of a critic that was saved.

    It is the backbone with a head of one label per token (`AutoModelForTokenClassification`), in
    float32 whatever the folder's precision: steps of a usual learning rate are smaller than
    bfloat16 can hold. Dropout is the given one, whatever the folder says. A head that
    the folder lacks starts at zero: from a policy, V = 0 everywhere. From a reward model, V is its
    reward for the conversation so far. The global random state is left alone.

    Raises:
        ConfigError: there is no such folder, no model in it that can be loaded, or one whose head
            cannot be taken over.
    """
    import torch
    from transformers import AutoModelForTokenClassification

    folder = find_model(path)
    config: Any = load_config(folder)
    config.num_labels = 1
    set_dropout(config, dropout)
    wide = torch.promote_types(config.dtype or torch.float32, torch.float32)
    # A missing head is drawn at random and reported; below it becomes 0.
    with torch.random.fork_rng(devices=()), _quiet():
        model, info = _load(
            AutoModelForTokenClassification,
            folder,
            config=config,
            dtype=wide,
            output_loading_info=True,
        )
    head = scalar_head(model)
    absent = {
        name: weight for name, weight in model.named_parameters() if name in info["missing_keys"]
    }
    is_other = [weight is not head.weight and weight is not head.bias for weight in absent.values()]
    if any(is_other) or (absent and "score.weight" in info["unexpected_keys"]):
        raise ConfigError(
            f"model folder {path} cannot become a critic: nothing in it fits {sorted(absent)};"
            " start from the policy, or from a reward model of the same family"
        )
    for weight in absent.values():
        torch.nn.init.zeros_(weight)
    set_dropout(model, dropout)
    critic: PreTrainedModel = model.to(device)
    return critic


def scalar_head(model: Any) -> torch.nn.Linear:
    """The layer of a token classifier that maps hidden states to labels."""
    head: torch.nn.Linear = getattr(model, "score", None) or model.classifier
    return head


def _load(loader: Any, path: str | Path, **kwargs: Any) -> Any:
    folder = find_model(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model folder {folder} has no config.json: save a model there with"
            " model.save_pretrained()"
        )
    from transformers.utils import logging

    avoid_broken_amx()
    logging.disable_progress_bar()
    with _readable(folder, "model"):
        loaded = loader.from_pretrained(folder, **_LOCAL, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if hasattr(model, "parameters"):
        _own_memory(model)
    return loaded


def _own_memory(model: PreTrainedModel) -> None:
    """Copy every tensor out of the memory-mapped file that it was read from.

    In the file it may start at any address, and some processors' kernels round differently at
    addresses that are no multiple of 64: a loaded model would not compute what a fresh one does.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def transformers_engine(
    model: PreTrainedModel,
    chat: Chat,
    *,
    synchronous: bool = False,
    history_mb: int = HISTORY_MB,
    routing: bool = False,
) -> TransformersEngine:
    """An engine for a model and the chat whose stop tokens end its turns.

    Args:
        routing: report the experts of each token, in `Generation.per_token`.
    """
    pad = chat.tokenizer.pad_token_id
    engine = TransformersEngine(
        model,
        chat.stop_ids,
        pad_id=0 if pad is None else pad,
        synchronous=synchronous,
        history_mb=history_mb,
    )
    if routing:
        engine.tell_routing()
    return engine


def loaded_engine(
    path: Path, stop_ids: frozenset[int], *, device: str, dtype: torch.dtype, **options: Any
) -> TransformersEngine:
    """An engine with its own model, from a folder.

    Its weights require gradients, as those that train do: on some processors PyTorch rounds
    differently for weights that do not.
    """
    return TransformersEngine(load_model(path, device, dtype=dtype), stop_ids, **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' reports of what is intended."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _readable(folder: Path, what: str) -> Iterator[None]:
    """Name the folder in whatever transformers and its file formats raise."""
    try:
        yield
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"the {what} of folder {folder} cannot be loaded: {type(error).__name__}: {why}"
        ) from error
