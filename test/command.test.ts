/** What all verbs of the command have in common. */
import { readFileSync } from "node:fs";
import { createServer } from "node:net";
import { describe, expect, test } from "vitest";
import { command, root } from "./harness/command.ts";

/** As `--help` lists them. */
function verbsOf(help: string): string[] {
  const [listed = ""] = (help.split("\nCommands:\n")[1] ?? "").split("\n\n");
  return [...listed.matchAll(/^ {2}([a-z]+)(?:\|\w+)?(?: |$)/gm)].flatMap(([, name]) =>
    name === undefined || name === "help" ? [] : [name],
  );
}

const all = verbsOf((await command(["--help"])).out);

/** What has to be given besides the address, for those that do not do with it alone. */
const needed: Readonly<Record<string, readonly string[]>> = {
  race: ["test/races/command/quota.ts"],
  kill: ["1", "--yes"],
  exec: ["--lock", "a", "--", "true"],
  hold: ["a"],
  bench: ["--yes"],
  migrate: ["--yes"],
  import: ["pg-boss"],
};
/** Work without a database, and with a terminal only. */
const apart = new Set(["choose", "completion", "order", "top"]);

test("docs/command.md lists them all", () => {
  const docs = readFileSync(`${root}docs/command.md`, "utf8");
  // `audit` is there with what it keeps.
  const listed = docs
    .split("\n")
    .filter((line) => line.startsWith("| `"))
    .flatMap((line) => [...line.matchAll(/`([a-z]+)`/g)].map(([, name]) => name));
  expect(all.filter((verb) => !listed.includes(verb))).toEqual([]);
  expect(all.length).toBeGreaterThan(15);
});

describe.each(all)("%s", (verb) => {
  test("--help has an example of it, and so have its own verbs", async () => {
    const { code, out, err } = await command([verb, "--help"]);
    expect([code, err]).toEqual([0, ""]);
    expect(out).toMatch(/\nExamples?:\n/);
    expect(out).toContain(`  holdfast ${verb}`);
    for (const sub of verbsOf(out)) {
      const { code: subCode, out: subOut } = await command([verb, sub, "--help"]);
      expect(subCode, sub).toBe(0);
      expect(subOut, sub).toMatch(/\nExamples?:\n/);
      expect(subOut, sub).toContain(`  holdfast ${verb} ${sub}`);
    }
  });
});

// What follows the options of exec is the command, whatever it looks like.
describe.each(all.filter((verb) => verb !== "exec"))("%s", (verb) => {
  test("an option that is none: one clear line, and where to look", async () => {
    const { code, out, err } = await command([verb, "--no-such-option", ...(needed[verb] ?? [])]);
    expect([code, out]).toEqual([2, ""]);
    expect(err).toMatch(/unknown option '--no-such-option'/);
    expect(err).not.toMatch(/^\s+at /m);
  });
});

describe.each(all)("%s", (verb) => {
  test("a number that is too large: the most is named", async () => {
    const { out } = await command([verb, "--help"]);
    const paths = [[verb], ...verbsOf(out).map((sub) => [verb, sub])];
    for (const path of paths) {
      const { out: help } = await command([...path, "--help"]);
      for (const [, option = ""] of help.matchAll(/^ {2}(--[a-z-]+) <(?:n|ms|id|version)> /gm)) {
        if (option === "--id" || option === "--find") continue;
        const { code, err } = await command([...path, option, "99999999999999999999"]);
        expect(code, err).toBe(2);
        expect(err, [...path, option].join(" ")).toMatch(
          / is invalid\. It must be a .*number.* from -?[\d.]+ to \d+\.$/m,
        );
      }
    }
  });
});

describe.each(all.filter((verb) => !apart.has(verb)))("%s, and no server", (verb) => {
  test("nobody there, or nothing that is a database: one clear line, no stack", async () => {
    // A port that was free a moment ago.
    const port = await new Promise<number>((resolve) => {
      const server = createServer().listen(0, "127.0.0.1", () => {
        const { port: free } = server.address() as { port: number };
        server.close(() => resolve(free));
      });
    });
    const rest = needed[verb] ?? [];
    for (const [url, says] of [
      [`postgres://ada:secret@127.0.0.1:${port}/shop`, /127\.0\.0\.1:\d+/],
      ["http://127.0.0.1/", /The address of the database/],
    ] as const) {
      const { code, err } = await command([verb, "--url", url, ...rest]);
      expect(code, err).toBe(2);
      expect(err).toMatch(says);
      expect(err).not.toMatch(/^\s+at /m);
      expect(err).not.toContain("secret");
    }
  });
});
