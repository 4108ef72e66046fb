/** More would take too much memory: then it begins anew. */
const most = 100_000;

/** Names of rows that were seen: what is not there has to be made first. That they are there still, the engine finds out. */
export class Remembered {
  #names = new Set<string>();

  hasAll(names: Iterable<string>): boolean {
    for (const name of names) if (!this.#names.has(name)) return false;
    return true;
  }

  add(names: Iterable<string>): void {
    if (this.#names.size > most) this.#names = new Set();
    for (const name of names) this.#names.add(name);
  }
}
