"""A model's name -> model and tokenizer, with one clear sentence for every way to fail.

A name is a folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.chat.tokens import Chat
from agentrl.engines.output import with_float32_output
from agentrl.engines.settings import HISTORY_MB
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_RANDOM = re.compile("(?P<dropout>dropout|pdrop)|layerdrop|jitter_noise")
"""Fields of a configuration that make a forward pass in training random."""
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
_OTHER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def find_model(name: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model: itself, or that of the hub's model in the local cache.

    A model of the hub that is not in the cache is downloaded; without `weights` only what is small.

    Raises:
        ConfigError: there is no such folder, and the hub does not have it or cannot be reached.
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
        # One request without retries says at once that there is no network.
        found = HfApi().model_info(repo, revision=revision, timeout=10)
        names = [file.rfilename for file in found.siblings or ()]
        kind = _WEIGHTS[0 if any(name.endswith(".safetensors") for name in names) else 1]
        patterns = [*_OTHER_FILES, *([kind] if weights else [])]
        return Path(snapshot_download(repo, revision=found.sha, allow_patterns=patterns))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        version = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"model {repo!r} is no folder, is not in the Hugging Face cache and cannot be"
            f" downloaded ({type(error).__name__}: {why}): run `hf download {repo}{version}` where"
            " there is a network, or give the path of a folder"
        ) from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        ConfigError: there is no such folder, or no tokenizer in it that can be loaded.
    """
    folder = find_model(path, weights=False)
    if not any((folder / name).is_file() for name in _TOKENIZER):
        raise ConfigError(
            f"model folder {folder} has no tokenizer: save one there with"
            " tokenizer.save_pretrained()"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with _readable(folder, "tokenizer"):
        # AutoTokenizer would give a generic tokenizer in a Qwen2 folder Qwen2's own way of cutting
        # words, silently.
        loader: Any = PreTrainedTokenizerFast if _is_generic(folder) else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, local_files_only=True)
    return tokenizer


def refuse_other_tokenizer(policy: str | Path, other: str | Path, setting: str) -> None:
    """See that two models read the same ids; a folder without a tokenizer is taken at its word.

    Args:
        setting: that names the other model.

    Raises:
        ConfigError: a token has another id in the other model.
    """
    if not any((find_model(other, weights=False) / name).is_file() for name in _TOKENIZER):
        return
    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (policy, other))
    if ours != theirs:
        differ = sum(theirs.get(token) != at for token, at in ours.items())
        raise ConfigError(
            f"{setting}={other}: its tokenizer ({len(theirs)} tokens) is not that of the policy"
            f" {policy}: {differ} of the policy's {len(ours)} tokens have another id there, or"
            " none, so it would misread them: give a model with the policy's tokenizer, as one that"
            f" was trained from {policy}"
        )


def _is_generic(folder: Path) -> bool:
    """Whether tokenizer.json is the whole truth about the folder's tokenizer."""
    config = folder / "tokenizer_config.json"
    if not (config.is_file() and (folder / "tokenizer.json").is_file()):
        return False
    return json.loads(config.read_text()).get("tokenizer_class") in (
        "TokenizersBackend",
        "PreTrainedTokenizerFast",
    )


def load_config(path: str | Path) -> PretrainedConfig:
    """Load the configuration of a model folder, without its weights.

    Raises:
        ConfigError: there is no such folder, or no config in it that can be read.
    """
    from transformers import AutoConfig

    config: PretrainedConfig = _load(AutoConfig, path)
    return config


def own_dtype(path: str | Path) -> str:
    """The precision of the weights in a model's folder, as in "bfloat16"."""
    return str(load_config(path).get_text_config().dtype or "float32").removeprefix("torch.")


def load_model(
    path: str | Path, device: str = "cpu", *, dropout: float = 0.0, **kwargs: Any
) -> PreTrainedModel:
    """Load the causal language model of a folder onto a device; its logits are float32.

    Args:
        dropout: probability at every place where its family drops something out, whatever the
            folder says; layers are never dropped, and routers never jittered.

    Raises:
        ConfigError: there is no such folder, no model in it that can be loaded, or no place for a
            dropout that was asked for.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    if not dropouts(config, dropout) and dropout:
        raise ConfigError(f"dropout={dropout}: a {config.model_type} model has none: set it to 0")
    model: PreTrainedModel = _load(AutoModelForCausalLM, path, config=config, **kwargs).to(device)
    return with_float32_output(model)


def dropouts(config: PretrainedConfig, share: float | None = None) -> list[float]:
    """Every dropout of a configuration, those of nested ones included.

    Args:
        share: set them all to it, and switch off what else makes a forward pass random.
    """
    found = list[float]()
    for name, value in list(vars(config).items()):
        if hasattr(value, "get_text_config"):
            found += dropouts(value, share)
        elif type(value) in (int, float) and (kind := _RANDOM.search(name)):
            if share is not None:
                value = share if kind["dropout"] else 0.0
                setattr(config, name, value)
            found += [float(value)] if kind["dropout"] else []
    return found


def best_device() -> str:
    """Where models run unless told otherwise: the first CUDA device, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_reward_model(path: str | Path) -> PreTrainedModel:
    """Load the sequence classifier of a folder, its head trained, onto the best device.

    Raises:
        ConfigError: there is no such folder, no model in it that can be loaded, or one whose head
            would be random.
    """
    from transformers import AutoModelForSequenceClassification

    with _quiet():  # what the folder lacks is told below
        model, found = _load(AutoModelForSequenceClassification, path, output_loading_info=True)
    heads = getattr(model.config, "reward_heads", 1)  # an ensemble of ours has more than one
    if found["missing_keys"] or model.config.num_labels != heads:
        raise ConfigError(
            f"model folder {path} is no reward model: it needs the weights of a head with"
            f" num_labels=1, not {model.config.num_labels} labels and missing"
            f" {sorted(found['missing_keys'])}"
        )
    loaded: PreTrainedModel = model.to(best_device())
    return loaded


def load_process_reward_model(path: str | Path) -> PreTrainedModel:
    """Load the classifier of tokens of a stage "process_reward", onto the best device.

    Raises:
        ConfigError: there is no such folder, or what it holds was not trained to judge turns.
    """
    if not getattr(load_config(path), "process_reward", False):
        raise ConfigError(
            f"model folder {path} is no process reward model: give the model of a stage ="
            ' "process_reward"'
        )
    from transformers import AutoModelForTokenClassification

    with _quiet():
        model, found = _load(
            AutoModelForTokenClassification, path, dtype="float32", output_loading_info=True
        )
    if found["missing_keys"]:
        raise ConfigError(
            f"model folder {path} is no process reward model: it lacks the weights"
            f' {sorted(found["missing_keys"])}: give the model of a stage = "process_reward"'
        )
    loaded: PreTrainedModel = model.to(best_device())
    return loaded


def load_critic(path: str | Path, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A value model from the folder of a policy, of a reward model, or of a critic that was saved.

    It is the backbone with a head of one label per token (`AutoModelForTokenClassification`), in
    float32 whatever the folder's precision: steps of a usual learning rate are smaller than
    bfloat16 can hold. Nothing in its backbone is dropped out, whatever the folder says. A head that
    the folder lacks starts at zero: from a policy, V = 0 everywhere. From a reward model, V is its
    reward for the conversation so far. The global random state is left alone.

    Raises:
        ConfigError: there is no such folder, no model in it that can be loaded, or one whose head
            cannot be taken over.
    """
    import torch
    from transformers import AutoConfig, AutoModelForTokenClassification

    folder = find_model(path)
    with _readable(folder, "config"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.num_labels = 1
    dropouts(config, 0.0)
    wide = torch.promote_types(config.dtype or torch.float32, torch.float32)
    with (
        torch.random.fork_rng(devices=()),
        _quiet(),
    ):  # a missing head is drawn at random, and reported; then it is 0
        model, found = _load(
            AutoModelForTokenClassification,
            folder,
            config=config,
            dtype=wide,
            output_loading_info=True,
        )
    head = scalar_head(model)
    absent = {
        name: weight for name, weight in model.named_parameters() if name in found["missing_keys"]
    }
    if any(weight is not head.weight and weight is not head.bias for weight in absent.values()) or (
        absent and "score.weight" in found["unexpected_keys"]
    ):
        raise ConfigError(
            f"model folder {path} cannot become a critic: nothing in it fits {sorted(absent)};"
            " start from the policy, or from a reward model of the same family"
        )
    for weight in absent.values():
        torch.nn.init.zeros_(weight)
    critic: PreTrainedModel = model.to(device)
    return critic


def scalar_head(model: Any) -> torch.nn.Linear:
    """The layer of a token classifier that makes labels of hidden states."""
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

    logging.disable_progress_bar()
    with _readable(folder, "model"):
        loaded = loader.from_pretrained(folder, local_files_only=True, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if hasattr(model, "parameters"):
        _own_memory(model)
    return loaded


def _own_memory(model: PreTrainedModel) -> None:
    """Move every tensor out of the mapped file that it was read from.

    There it may begin at any address, and on some processors kernels round differently at
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
        routing: say which experts each token went to.

    Raises:
        ConfigError: it is to say that, and the model has no experts or hides its choice.
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
    """An engine with a model of its own, from a folder; options are those of the engine.

    Its weights say that they need gradients, as those that train do: on some processors PyTorch
    rounds differently where they do not.
    """
    return TransformersEngine(load_model(path, device, dtype=dtype), stop_ids, **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting what is meant to be so."""
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
