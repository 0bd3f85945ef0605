// Shows the rows that match, in the order of the chosen column. It asks no network: the rows are in the page.
const MOST = 200;
const {rows, pages, folder} = JSON.parse(document.getElementById("data").textContent);
const linked = new Set(pages);
const query = document.getElementById("query"), body = document.getElementById("rows"), said = document.getElementById("shown");
const headings = [...document.querySelectorAll("th")];
const texts = rows.map(row => `${row[2]} ${row[3]}`.toLowerCase());
let column = 0, descending = true, chosen = false;  // until a column is chosen, samples with pages come first

function show() {
  const [, , iteration] = query.value.match(/(^|\s)iteration\s+(\d+)(?=\s|$)/i) ?? [];
  const words = query.value.toLowerCase().replace(/(^|\s)iteration\s+\d+(?=\s|$)/, " ").split(/\s+/).filter(Boolean);
  const found = rows.filter((row, i) =>
    (iteration === undefined || row[1] === Number(iteration)) && words.every(word => texts[i].includes(word)));
  const sign = descending ? -1 : 1;
  found.sort((a, b) => (chosen ? 0 : linked.has(b[0]) - linked.has(a[0])) || sign * (a[column] < b[column] ? -1 : a[column] > b[column] ? 1 : a[0] - b[0]));
  body.replaceChildren(...found.slice(0, MOST).map(row => {
    const line = document.createElement("tr");
    row.forEach((value, i) => {
      const cell = line.insertCell();
      const text = value === null ? "–" : typeof value === "number" && !Number.isInteger(value) ? value.toFixed(3) : value;
      if (i === 0 && linked.has(value)) {
        const link = document.createElement("a");
        link.href = `${folder}inspect-${value}.html`;
        link.textContent = text;
        cell.append(link);
      } else cell.textContent = text;
      cell.className = i === 3 ? value : i === 2 ? "mono" : "number";
    });
    return line;
  }));
  const more = found.length > MOST ? `, the first ${MOST} shown` : "";
  said.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples${more}`;
  headings.forEach((each, i) => each.setAttribute("aria-sort", i !== column ? "none" : descending ? "descending" : "ascending"));
}

headings.forEach((each, i) => each.firstElementChild.addEventListener("click", () => {
  descending = i === column && !descending;
  column = i;
  chosen = true;
  show();
}));
query.addEventListener("input", show);

// A report's points lead to the samples of an iteration.
function follow() {
  const [, iteration] = location.hash.match(/^#iteration-(\d+)$/) ?? [];
  if (iteration !== undefined) query.value = `iteration ${iteration}`;
  show();
}
addEventListener("hashchange", follow);
follow();
