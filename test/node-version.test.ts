/** A Node that is too old is told so, in one line, before anything else can fail on it. */
import { execFile, execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { delimiter, join } from "node:path";
import { pathToFileURL } from "node:url";
import { expect, test } from "vitest";
import { environment, root } from "./harness/command.ts";

const needed = "22.13";

function versionOf(file: string): string {
  try {
    return execFileSync(file, ["-p", "process.versions.node"], { encoding: "utf8", stdio: "pipe" }).trim();
  } catch {
    return "";
  }
}

interface Old {
  readonly file: string;
  readonly args: readonly string[];
  readonly version: string;
}

/** One that is installed here; else this one, which says that it is older than it is. */
function oldNode(): Old {
  for (const folder of (process.env["PATH"] ?? "").split(delimiter)) {
    const file = join(folder, "node");
    const version = versionOf(file);
    if (/^(1[89]|20|21)\./.test(version)) return { file, args: [], version };
  }
  console.warn("No Node older than 22 on the PATH: this one pretends to be one.");
  const version = "20.19.0";
  const fake = `Object.defineProperty(process, "versions", { value: { ...process.versions, node: "${version}" } })`;
  return {
    file: process.execPath,
    args: ["--import", `data:text/javascript,${encodeURIComponent(fake)}`],
    version,
  };
}

const old = oldNode();

/** Of what is built, as it is installed: an older Node knows nothing of TypeScript. */
function run(...args: string[]): Promise<{ code: unknown; out: string; err: string }> {
  return new Promise((resolve) =>
    execFile(old.file, [...old.args, ...args], { cwd: root, env: environment() }, (error, out, err) =>
      resolve({ code: error?.code ?? 0, out, err }),
    ),
  );
}

test.each([
  ["the command's own", "packages/cli/dist/bin.js"],
  ["the library's", "packages/holdfast/bin/holdfast.js"],
])("%s file says which is needed and which this is, whatever the verb", async (_, bin) => {
  for (const verb of [["--version"], ["doctor"], ["race", "nowhere.ts"], ["nonsense"]]) {
    const { code, out, err } = await run(bin, ...verb);
    expect([code, out]).toEqual([2, ""]);
    expect(err).toMatch(
      new RegExp(`^holdfast: Node ${needed} or newer is needed, and this is Node ${old.version} .*\n$`),
    );
  }
});

test("and so does the library, when it is used", async () => {
  const url = pathToFileURL(join(root, "packages/holdfast/dist/index.js")).href;
  const text = `import { holdfast } from ${JSON.stringify(url)}; try { holdfast({}); } catch (e) { console.log(e.code + ": " + e.message); }`;
  const { out, err } = await run("--input-type=module", "-e", text);
  expect(err).toBe("");
  expect(out).toBe(
    `HF_UNSUPPORTED: Holdfast needs Node ${needed} or newer, and this is Node ${old.version}\n`,
  );
});

test("is what the packages ask for", () => {
  for (const name of ["holdfast", "cli"]) {
    const { engines } = JSON.parse(readFileSync(join(root, `packages/${name}/package.json`), "utf8")) as {
      engines: { node: string };
    };
    expect(engines.node).toBe(`>=${needed}`);
  }
});
