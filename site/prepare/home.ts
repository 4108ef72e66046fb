/** The first page: what it is, and the way to the page of one's own problem. */
import { read } from "./places.ts";

/** The table that docs/choose.md begins with. */
function chooser(): string {
  const [, table] = /\n(\|[\s\S]*?)\n\n/.exec(read("docs/choose.md")) ?? [];
  if (table === undefined) throw new Error("docs/choose.md begins with no table");
  // Its anchors are those of the page.
  return table.replaceAll("](#", "](choose.md#");
}

export const home = (): string => `---
layout: home
title: Holdfast
titleTemplate: false
hero:
  name: Holdfast
  text: Check, then write, exactly
  tagline: Code that reads a row, decides and writes is wrong as soon as two of it run at once. Holdfast makes it exact, on the database that you already run, through the client that you already use.
  actions:
    - theme: brand
      text: Quick start
      link: /quick-start
    - theme: alt
      text: See a race
      link: /quota#the-problem
    - theme: alt
      text: Choose
      link: /choose
---

## Where to start

${chooser()}

## Also

- [Find the race in your own code](races.md): a test that tries the orders in which two calls can interleave.
- [What is guaranteed](guarantees.md), and [what each engine can do](capabilities.md).
- [Clients](adapters), [engines](engines), [errors](errors.md), [the command](command.md), [examples](../examples/README.md).
`;
