/** What several databases answer, as one list: in the order of its names, in which each of them is already. */
export function merged<T>(
  lists: readonly (readonly T[])[],
  name: (item: T) => string,
  /** Of two that have the same name: what both come to. Left out: there are none. */
  both?: (a: T, b: T) => T,
): T[] {
  const [first, ...rest] = lists;
  if (first && rest.length === 0) return [...first];
  const found = new Map<string, T>();
  for (const [i, item] of lists.flat().entries()) {
    const known = both ? name(item) : `${name(item)}\0${i}`;
    const before = found.get(known);
    found.set(known, before && both ? both(before, item) : item);
  }
  return [...found.values()].toSorted((a, b) => Buffer.compare(Buffer.from(name(a)), Buffer.from(name(b))));
}
