"""Fetches a model from the Hugging Face hub into its own cache, or finds it there.

The hub's client reads HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN as everywhere else.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from model.checkpoint.errors import CheckpointError
from model.checkpoint.json_file import read_object
from model.config import ConfigError, LlamaConfig

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_UNWANTED = ["*/*"]  # copies in other formats live in subfolders


def fetch_from_hub(name: str) -> Path:
    """The local snapshot folder of the model `name` (owner/name), downloaded if it is not in the cache.

    The config comes first, so that a model of another kind is refused before its weights are fetched. Raises
    CheckpointError when the model cannot be had, and ConfigError when it is not a plain Llama.
    """
    try:
        # Not hf_hub_download: with no network that retries for half a minute before it looks into the cache.
        folder = Path(snapshot_download(name, allow_patterns=["config.json"]))
        LlamaConfig.from_hf(read_object(folder / "config.json"))
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise _error(name, "its licence must be accepted on huggingface.co, and HF_TOKEN set", error) from error
    except RepositoryNotFoundError as error:
        raise _error(name, "the hub has no such model, or it is private and HF_TOKEN is not set", error) from error
    except LocalEntryNotFoundError as error:
        raise _error(
            name, "it is not in the local cache, and the hub cannot be reached or is switched off", error
        ) from error
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # whatever the hub's client and the HTTP library under it raise
        raise _error(name, "the download failed", error) from error


def _error(name: str, reason: str, error: Exception) -> CheckpointError:
    detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"there is no file or folder {name!r} here, and it could not be fetched from the Hugging Face hub: "
        f"{reason} ({detail}). To use a model that is already on this machine, pass its folder or .gguf file"
    )
