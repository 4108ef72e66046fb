/** The first page: what it is, and the way to the page of one's own problem. */
import { read } from "./places.ts";

/** The table that the README begins with. */
const starts = (): string => ofReadme(/\n(\|[\s\S]*?)\n\n/);

const install = (): string => ofReadme(/\n(## Install\n[\s\S]*?)(?=\n## )/);

function ofReadme(part: RegExp): string {
  const [, text] = part.exec(read("README.md")) ?? [];
  if (text === undefined) throw new Error(`README.md has no ${part}`);
  return text.replaceAll("](docs/", "](");
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

${starts()}

${install()}

## Also

- [Find the race in your own code](races.md): a test that tries the orders in which two calls can interleave.
- [What is guaranteed](guarantees.md), and [what each engine can do](capabilities.md).
- [Clients](adapters), [engines](engines), [errors](errors.md), [the command](command.md), [examples](../examples/README.md).
`;
