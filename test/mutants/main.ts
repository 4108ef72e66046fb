/**
 * `npm run test:mutants`: the library without one of its protections, each in turn, must be found out.
 * With names as arguments: these only.
 */
import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { startPostgres } from "@holdfast/cli";
import { protections } from "./protections.ts";
import { type Trial, trials } from "./trials.ts";

const one = fileURLToPath(new URL("./one.ts", import.meta.url));
const hook = new URL("./hook.ts", import.meta.url).href;
/** Of one trial. */
const limitMs = 90_000;

interface Said {
  readonly verdict: "kept" | "broken" | "failed";
  readonly why?: string;
}

const all = protections();
const wanted = process.argv.slice(2);
for (const name of wanted)
  if (!all.some((each) => each.name === name)) throw new Error(`There is no protection "${name}"`);
const chosen = all.filter(({ name }) => wanted.length === 0 || wanted.includes(name));
const of = (name: string) => trials.filter(({ kills }) => kills.includes(name));

const server = await startPostgres({ settings: { fsync: "off" } });
let databases = 0;

function attempt(trial: Trial, url: string, mutant: string | undefined): Promise<Said> {
  return new Promise((resolve) => {
    const child = spawn(
      process.execPath,
      ["--conditions=holdfast-source", "--import", hook, one, trial.name, url],
      {
        stdio: ["ignore", "pipe", "pipe"],
        env: { ...process.env, HOLDFAST_MUTANT: mutant ?? "", NODE_NO_WARNINGS: "1" },
      },
    );
    let [output, errors] = ["", ""];
    child.stdout.on("data", (chunk) => (output += String(chunk)));
    child.stderr.on("data", (chunk) => (errors += String(chunk)));
    const timer = setTimeout(() => child.kill("SIGKILL"), limitMs);
    child.once("close", (code) => {
      clearTimeout(timer);
      const last = output.trim().split("\n").at(-1) ?? "";
      if (last.startsWith('{"verdict"')) resolve(JSON.parse(last) as Said);
      else
        resolve({ verdict: "failed", why: `it ended with ${code ?? "SIGKILL"}\n${output}${errors}`.trim() });
    });
  });
}

async function tried(trial: Trial, mutant: string | undefined): Promise<Said & { seconds: string }> {
  const database = `trial_${++databases}`;
  await server.createDatabase(database);
  const start = performance.now();
  const said = await attempt(trial, server.url(database), mutant);
  const seconds = ((performance.now() - start) / 1000).toFixed(1);
  await server.dropDatabase(database).catch(() => {});
  return { ...said, seconds };
}

let unfit = 0;
let survived = 0;
const indented = (text = "") => text.replaceAll(/^/gm, "      ");

try {
  // What fails with everything in its place says nothing of anybody.
  for (const trial of new Set(chosen.flatMap(({ name }) => of(name)))) {
    const { verdict, why, seconds } = await tried(trial, undefined);
    if (verdict === "kept") continue;
    unfit++;
    console.log(`✗ with every protection: ${trial.name} (${trial.by}, ${seconds} s)\n${indented(why)}`);
  }
  for (const { name, against } of chosen) {
    let killed = false;
    for (const trial of of(name)) {
      const { verdict, why, seconds } = await tried(trial, name);
      killed = verdict === "broken";
      if (killed)
        console.log(
          `✓ ${name}: killed by ${trial.by}, ${trial.name} (${seconds} s)\n${indented(firstLine(why))}`,
        );
      else if (verdict === "failed")
        console.log(`  ${name}: ${trial.name} failed by itself (${seconds} s)\n${indented(why)}`);
      if (killed) break;
    }
    if (killed) continue;
    survived++;
    console.log(`✗ ${name} survived. ${against}`);
  }
} finally {
  await server.stop();
}
console.log(
  `${chosen.length - survived} of ${chosen.length} killed${unfit > 0 ? `, ${unfit} trials failed with every protection` : ""}`,
);
process.exitCode = survived + unfit === 0 ? 0 : 1;

function firstLine(text = ""): string {
  return text.split("\n")[0] ?? "";
}
