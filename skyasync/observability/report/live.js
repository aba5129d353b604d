// The live page fetches itself and shows what is new; what is open and the colours of the samples stay as they are.
let seen = "";
async function update() {
  try {
    const answer = await fetch(location.href, {headers: {"If-None-Match": seen}, cache: "no-store"});
    if (answer.status === 200) {
      seen = answer.headers.get("ETag");
      const made = new DOMParser().parseFromString(await answer.text(), "text/html");
      const chosen = document.querySelector("input.choice:checked");
      const open = [...document.querySelectorAll("details[open]")];
      for (const part of ["title", "header", "nav", "main"])
        document.querySelector(part).replaceWith(made.querySelector(part));
      if (chosen) document.getElementById(chosen.id).checked = true;
      for (const part of open) document.getElementById(part.id)?.setAttribute("open", "");
    }
    document.body.classList.remove("ended");
  } catch {
    document.body.classList.add("ended");
  }
  setTimeout(update, 3000);
}
setTimeout(update, 3000);
