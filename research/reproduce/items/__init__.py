"""All figures and tables, in the paper's order; each has a file of its own."""

from ..item import Item
from . import fig1, fig3, fig5, fig6, fig7, table1, table2, table3, table4

ITEMS: dict[str, Item] = {
    module.ITEM.name: module.ITEM for module in (fig1, fig3, fig5, fig6, fig7, table1, table2, table3, table4)
}
