"""What a user may say about a draft that is converted: an option for each field of `ConvertOptions`."""

from typing import Annotated

import typer

AuxLayerIdsOption = Annotated[
    str | None, typer.Option(metavar="2,14,27", help="Depths of the verifier that feed the draft; 0 = embeddings.")
]
LayerIdsMeanOption = Annotated[
    str | None, typer.Option(help="How the file counts layers: depth, or output (one less).")
]
D2tHoldsOption = Annotated[str | None, typer.Option(help="What its vocabulary map holds: offsets or ids.")]
SpeculativeTokensOption = Annotated[int | None, typer.Option(metavar="K", help="Drafts a step.")]
NormBeforeResidualOption = Annotated[
    bool | None, typer.Option(help="Whether layer 0 adds the normed state or the plain one.")
]
NormBeforeFcOption = Annotated[bool | None, typer.Option(help="One norm over all features.")]
FcNormOption = Annotated[bool | None, typer.Option(help="One norm for each feature.")]
NormOutputOption = Annotated[bool | None, typer.Option(help="Whether the next draft reads the normed state.")]
MaskTokenIdOption = Annotated[int | None, typer.Option(help="The token that stands for one still unknown.")]
BlockSizeOption = Annotated[int | None, typer.Option(help="Slots of a block.")]
SampleFromAnchorOption = Annotated[bool | None, typer.Option(help="Whether a slot predicts the token after its own.")]
SlidingWindowNonCausalOption = Annotated[bool | None, typer.Option(help="Whether the slots of a block see each other.")]
MarkovHeadTypeOption = Annotated[str | None, typer.Option(help="vanilla, gated or rnn.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as stored otherwise.")]
