// A field above each table of a page that asks for one: only the rows that have all of its words stay.
document$.subscribe(() => {
  for (const place of document.querySelectorAll(".filter-tables")) {
    const field = document.createElement("input");
    field.className = "table-filter";
    field.type = "search";
    field.placeholder = "Filter the tables: name, type or a word of the text";
    place.replaceChildren(field);
    const tables = [...place.closest("article").querySelectorAll("table")];
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const table of tables)
        for (const row of table.tBodies[0].rows) {
          const text = row.textContent.toLowerCase();
          row.hidden = !words.every((word) => text.includes(word));
        }
    });
  }
});
