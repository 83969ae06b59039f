"""Nodes for ComfyUI that apply tokenmerge: Hold and Merge."""

from .needs import check_needs

# Or an import below would fail in words of its own.
check_needs()

from comfy_api.latest import ComfyExtension  # noqa: E402

from .nodes import NODES  # noqa: E402

# Help pages of the nodes lie in its folder `docs`.
WEB_DIRECTORY = "./web"


class TokenMergeExtension(ComfyExtension):
    async def get_node_list(self):
        return NODES


async def comfy_entrypoint():
    return TokenMergeExtension()
