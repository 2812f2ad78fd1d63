"""``hpjob recipes``: list and show packaged recipes."""

from __future__ import annotations

import typer

recipes_app = typer.Typer(help="List and show recipes.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def list_recipes(as_json: bool = typer.Option(False, "--json", help="Print one JSON document.")) -> None:
    """List the packaged recipes."""
    import json

    from hpjob.recipe.load import load_recipe, recipe_names

    recipes = [load_recipe(name) for name in recipe_names()]
    recipes.sort(key=lambda recipe: (recipe.model.num_parameters, recipe.name))
    if as_json:
        rows = [{"name": r.name, "parameters": r.model.num_parameters, "description": r.description} for r in recipes]
        typer.echo(json.dumps({"version": 1, "recipes": rows}, indent=2))
        return
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        typer.echo(f"{recipe.name:<{width}}  {_count(recipe.model.num_parameters):>7}  {recipe.description}")


@recipes_app.command("show")
def show_recipe(
    name: str = typer.Argument(help="Packaged recipe or a .yaml file."),
    overrides: list[str] = typer.Option([], "--set", help="Change a value: --set training.lr=3e-4. Repeatable."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Print every value of a recipe, defaults included."""
    from hpjob.recipe.load import dump_recipe, load_recipe

    recipe = load_recipe(name, overrides)
    typer.echo(recipe.model_dump_json(indent=2) if as_json else dump_recipe(recipe).rstrip())


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
