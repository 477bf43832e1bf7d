"""Uploading an export."""

from pathlib import Path


def push(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload an exported folder to the Hugging Face hub; returns its address.

    Raises:
        ValueError: huggingface_hub is missing, nobody is logged in, or the hub refuses.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ValueError("--push needs huggingface_hub; install it, or leave --push out") from None
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as error:  # its own errors, and those of the network
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"--push {repository}: {folder} is written, not uploaded ({reason})"
        ) from None
    return f"https://huggingface.co/{repository}"
