import { command } from "./command.ts";

interface Told {
  readonly probes: readonly { id: string; node?: number; verdict: string; seen: string }[];
  readonly nodes?: readonly unknown[];
  readonly alone?: string;
}

/** What `holdfast certify … --json` says of each node. */
export async function certified(args: readonly string[]) {
  const { code, out, err } = await command(["certify", ...args, "--json"]);
  const { probes, nodes, alone } = JSON.parse(out) as Told;
  return {
    code,
    err,
    nodes,
    alone,
    /** `node`: undefined for the first one alone. */
    of: (node: number | undefined, verdict: string): string[] =>
      probes.filter((each) => each.node === node && each.verdict === verdict).map(({ id }) => id),
    text: probes.map(({ id, verdict, seen }) => `${verdict} ${id}: ${seen}`).join("\n"),
  };
}
