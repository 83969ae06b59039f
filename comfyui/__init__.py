"""Nodes for ComfyUI that apply tokenmerge: Hold and Merge."""

from .needs import check_needs

# Before the imports below, which would fail with a less helpful message.
check_needs()

from comfy_api.latest import ComfyExtension  # noqa: E402

from .nodes import NODES  # noqa: E402

# ComfyUI looks for the nodes' help pages in its folder `docs`.
WEB_DIRECTORY = "./web"


class TokenMergeExtension(ComfyExtension):
    async def get_node_list(self):
        return NODES


async def comfy_entrypoint():
    return TokenMergeExtension()
