/** The tab of one's own client is open on every page, once it has been chosen on one. */
import { onContentUpdated } from "vitepress";
import { onMounted, onUnmounted } from "vue";

const key = "holdfast-client";

function remembered(): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    // Forbidden by the browser: each page begins with its first tab.
    return null;
  }
}

function remember(title: string): void {
  try {
    localStorage.setItem(key, title);
  } catch {
    // As above.
  }
}

/** In every group of the page that has it. */
function open(title: string): void {
  for (const label of document.querySelectorAll<HTMLLabelElement>(".vp-code-group .tabs label")) {
    if (label.textContent?.trim() !== title) continue;
    const input = document.getElementById(label.htmlFor);
    if (input instanceof HTMLInputElement && !input.checked) input.click();
  }
}

/** What the reader does; not what `open` does. */
function change({ target, isTrusted }: Event): void {
  if (!isTrusted || !(target instanceof HTMLInputElement) || !target.closest(".vp-code-group")) return;
  const title = document.querySelector(`label[for="${target.id}"]`)?.textContent?.trim();
  if (title === undefined) return;
  remember(title);
  const { top } = target.getBoundingClientRect();
  open(title);
  // Groups above may have become longer or shorter: what was clicked stays where it is.
  scrollBy(0, target.getBoundingClientRect().top - top);
}

export function rememberTabs(): void {
  onMounted(() => document.addEventListener("change", change));
  onUnmounted(() => document.removeEventListener("change", change));
  onContentUpdated(() => {
    const title = remembered();
    if (title !== null) open(title);
  });
}
