"""The cells that a requalification checks: all approved ones. An image's tag is resolved again and may now name a newer one."""

from prefect import get_run_logger

from tasks.step import step
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import read_run
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.provision import Launch
from vllm_qualify.plan.choice import Choice
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.loading import load_recipe

POINTER = "/pointer.json"


@step("approved cells", "approved cells of {recipe}")
def approved_cells(recipe: str, store: str) -> list[tuple[str, Choice, Launch]]:
    """GPU type, choice and launch of each cell of a recipe that was approved and not revoked since.

    Raises CallerError if there is no such recipe, and TamperedError, StoreError if the store cannot be trusted or read.
    """
    opened, folder = open_store(store), f"approvals/{load_recipe(recipe).recipe.name}/"
    cells = []
    for key in [key for key in opened.keys(folder) if key.endswith(POINTER)]:
        cell = key.removeprefix("approvals/").removesuffix(POINTER)
        pointer = read_pointer(opened, cell)
        if pointer is None or pointer.last.revoked:
            get_run_logger().info(f"{cell} was revoked: a person qualifies it again")
            continue
        plan = read_run(opened, cell, pointer.last.run_id).report.plan
        choice = Choice(gpu_type=plan.cell.gpu_type, variant=plan.cell.variant, profile=plan.cell.profile)
        # An image by its tag, if it had one.
        images = {"image": plan.server.engine, "client_image": plan.client_image}
        named = {name: image.reference for name, image in images.items() if isinstance(image, EngineImage)}
        cells.append((plan.cell.gpu_type, choice, Launch(launcher=plan.server.engine.launcher, **named)))
    return cells
