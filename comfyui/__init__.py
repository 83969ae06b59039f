"""Nodes for ComfyUI that apply tokenmerge: Hold and Merge."""

from comfy_api.latest import ComfyExtension

from .nodes import NODES

# Help pages of the nodes lie in its folder `docs`.
WEB_DIRECTORY = "./web"


class TokenMergeExtension(ComfyExtension):
    async def get_node_list(self):
        return NODES


async def comfy_entrypoint():
    return TokenMergeExtension()
