/** Each backend is in one of this folder's files. */
import { readFileSync, readdirSync } from "node:fs";
import { expect, test } from "vitest";
import { backends } from "../backends.ts";

test("every kind of server has its file", () => {
  const named = readdirSync(new URL(".", import.meta.url))
    .map((file) => /^conformanceOn\((.*)\)/m.exec(readFileSync(new URL(file, import.meta.url), "utf8"))?.[1])
    .flatMap((servers) => [...(servers ?? "").matchAll(/"(\w+)"/g)].map(([, server = ""]) => server));
  expect(named.toSorted()).toEqual([...new Set(backends.map(({ server }) => server))].toSorted());
});
