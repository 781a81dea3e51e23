// what scrolls sideways can be reached, and scrolled, from the keyboard
function reach() {
  for (const e of document.querySelectorAll('pre, .table-wrapper, .cell_output')) if (e.scrollWidth > e.clientWidth) e.tabIndex = 0
}
addEventListener('load', reach)
addEventListener('resize', reach)
addEventListener('toggle', reach, true)
