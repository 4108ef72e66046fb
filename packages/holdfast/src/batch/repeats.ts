/** Ids that repeat within one batch: the same content has the same answer, and other content comes after it. */
import { Failed } from "./coalesce.ts";

export interface Repeats<Item, Answer> {
  /** What it is known by; undefined: by nothing that could come again. */
  id(item: Item): string | undefined;
  /** Whether both ask for the same thing. */
  same(one: Item, other: Item): boolean;
  /** What is told to those that are not the first. */
  replayed(answer: Answer): Answer;
}

/** `send`: those that are the first of their id; `after`: each of the others whose content is another one, in their order. */
export async function foldRepeats<Item, Answer>(
  repeats: Repeats<Item, Answer>,
  items: readonly Item[],
  send: (items: readonly Item[]) => Promise<readonly (Answer | Failed)[]>,
  after: (item: Item) => Promise<Answer | Failed>,
): Promise<(Answer | Failed)[]> {
  const first = new Map<string, number>();
  const now: Item[] = [];
  /** Places in `now`; undefined: later. */
  const places = items.map((item) => {
    const id = repeats.id(item);
    const at = id === undefined ? undefined : first.get(id);
    if (at !== undefined) return repeats.same(item, now[at] as Item) ? at : undefined;
    if (id !== undefined) first.set(id, now.length);
    return now.push(item) - 1;
  });
  const answers = await send(now);
  const told = new Set<number>();
  const all: (Answer | Failed)[] = [];
  for (const [i, at] of places.entries()) {
    if (at === undefined) {
      all.push(await after(items[i] as Item));
      continue;
    }
    const answer = answers[at] as Answer | Failed;
    all.push(answer instanceof Failed || !told.has(at) ? answer : repeats.replayed(answer));
    told.add(at);
  }
  return all;
}
