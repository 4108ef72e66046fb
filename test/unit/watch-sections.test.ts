/** Transactions that the caller opens, one after the other, in a loop that never leaves its context. */
import { key } from "holdfast";
import { expect, test } from "vitest";
import { type Section, sections } from "../../packages/holdfast/src/context/section.ts";
import { watch } from "../../packages/holdfast/src/watch/watch.ts";

const asked = (name: string) => ({ kind: "key", keys: [{ key: key(name, 1), mode: "exclusive" }] }) as const;

const locks = [asked("one-by-one-a"), asked("one-by-one-b")] as const;

test("those that are over are not around the next one, however many there were", () => {
  const watched = watch(
    { hazards: "count", slow: undefined, orderFile: undefined },
    (name) => name,
    (text) => text,
    false,
  );
  let section: Section | undefined;
  let end: (() => void) | undefined;
  sections.run(undefined as never, () => {
    for (let i = 0; i < 20_000; i++) {
      section = watched?.joined({}, (then) => (end = then), undefined);
      if (section) sections.enter(section);
      const lock = locks[i % 2] ?? locks[0];
      section?.asks(lock, undefined);
      section?.took(lock, undefined);
      end?.();
    }
  });
  expect(section?.failure).toBeUndefined();
  watched?.close();
});
