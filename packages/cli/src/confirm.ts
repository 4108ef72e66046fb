import { Failure, Interrupted, exitCodes } from "./failure.ts";
import { note, printJson } from "./terminal.ts";

/** Asks, unless the answer was given on the command line. Nobody there to be asked: it must have been. */
export async function confirmed(question: string, yes: boolean | undefined): Promise<boolean> {
  if (yes) return true;
  if (!process.stdin.isTTY || !process.stderr.isTTY)
    throw new Failure(`${question} There is no terminal to answer on: add --yes to say so.`);
  const { default: confirm } = await import("@inquirer/confirm");
  try {
    return await confirm({ message: question, default: false }, { output: process.stderr });
  } catch (error) {
    if (error instanceof Error && error.name === "ExitPromptError") throw new Interrupted();
    throw error;
  }
}

/** The answer was no. */
export function declined(json: boolean | undefined): void {
  note("Nothing was done.");
  if (json) printJson({ done: false });
  process.exitCode = exitCodes.no;
}
