// A field with data-filters shows the rows of that table which contain all of its words.
for (const field of document.querySelectorAll("input[data-filters]")) {
  const rows = [...document.getElementById(field.dataset.filters).tBodies[0].rows]
  const texts = rows.map((row) => row.textContent.toLowerCase())
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/)
    rows.forEach((row, i) => (row.hidden = !words.every((word) => texts[i].includes(word))))
  })
}
