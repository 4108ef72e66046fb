import { trail } from "holdfast/audit";
import { note, print, printJson } from "../terminal.ts";
import { onServer } from "./place.ts";
import { cell, firstLine, printTable, when } from "./show.ts";

export interface AuditOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly limit: number;
  readonly before?: number;
  readonly target?: string;
  readonly json?: true;
}

export async function showTrail(options: AuditOptions): Promise<void> {
  await onServer("audit", options, async ({ hf }) => {
    const { limit, before, target } = options;
    const lines = await trail(hf, {
      limit,
      ...(before !== undefined && { before }),
      ...(target !== undefined && { target }),
    });
    if (options.json) {
      printJson({ lines });
      return;
    }
    if (lines.length === 0) {
      print(target === undefined ? "Nothing was changed by hand." : "Nothing was changed by hand there.");
      return;
    }
    printTable(
      ["id", "at (UTC)", "outcome", "action", "target", "by", "details"],
      lines.map((line) => [
        line.id,
        when(line.at),
        line.outcome,
        cell(line.action),
        cell(line.target),
        cell(line.actor),
        cell(line.error === undefined ? words(line.details) : firstLine(line.error)),
      ]),
      ["by", "id"],
    );
    if (lines.length === limit) note(`More: --before ${lines.at(-1)?.id}`);
  });
}

function words(details: unknown): string {
  if (typeof details !== "object" || details === null) return "";
  return Object.entries(details)
    .map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join(" ");
}
