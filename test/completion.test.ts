/** Shell completion, as a shell asks for it. */
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { stripVTControlCharacters } from "node:util";
import { spawn } from "@lydell/node-pty";
import { afterAll, beforeAll, expect, test } from "vitest";
import { bin, command, environment } from "./harness/command.ts";
import { eventually } from "./harness/wait.ts";

let folder: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "holdfast-completion-"));
  const quoted = [process.execPath, ...bin].map((word) => `'${word}'`).join(" ");
  writeFileSync(join(folder, "holdfast"), `#!/bin/sh\nexec ${quoted} "$@"\n`, { mode: 0o755 });
});

afterAll(() => rmSync(folder, { recursive: true, force: true }));

test("bash completes verbs, verbs of verbs, options and their values", async () => {
  const env = environment({
    PATH: `${folder}:${process.env["PATH"]}`,
    PS1: "> ",
    HISTFILE: "",
    TERM: "xterm",
  });
  const bash = spawn("bash", ["--norc", "--noprofile"], { cols: 200, rows: 30, cwd: folder, env });
  let written = "";
  bash.onData((data) => (written += data));
  const ended = new Promise<void>((resolve) => bash.onExit(() => resolve()));
  const seen = (what: string): Promise<unknown> =>
    eventually(() => stripVTControlCharacters(written).includes(what) || Promise.reject(new Error(written)));
  try {
    bash.write("source <(holdfast completion bash) && echo rea''dy\r");
    await seen("ready");
    bash.write("holdfast de\t");
    await seen("holdfast demo ");
    bash.write("--on\t");
    await seen("holdfast demo --only ");
    bash.write("la\t");
    await seen("holdfast demo --only last-item ");
    // Ctrl-U: another line.
    bash.write("\x15holdfast queue dis\t");
    await seen("holdfast queue discard ");
    bash.write("\x15holdfast completion \t\t");
    await seen("bash        fish        powershell  zsh");
  } finally {
    bash.kill("SIGKILL");
    await ended;
  }
});

test("a script for every shell; another one is not known", async () => {
  const shells = ["bash", "zsh", "fish", "powershell"];
  const scripts = await Promise.all(shells.map((shell) => command(["completion", shell])));
  for (const { code, out, err } of scripts) {
    expect(code, err).toBe(0);
    expect(out).toMatch(/holdfast complete (?:--|'--') /);
  }
  const { code, out, err } = await command(["completion", "tcsh"]);
  expect({ code, out }).toEqual({ code: 2, out: "" });
  expect(err).toContain("Allowed choices are bash, zsh, fish, powershell.");
});
