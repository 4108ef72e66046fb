/** Debian's Chromium, for what is shown in a browser. */
import { existsSync } from "node:fs";
import { type Browser, chromium } from "playwright-core";
import { type DebianPackage, installMissing } from "./debian.ts";

const PROGRAM = "/usr/bin/chromium";

const chromiumPackage: DebianPackage = { name: "chromium", installed: () => existsSync(PROGRAM) };

/** Why it is not here; undefined: it is. Installs it first, if it may: one test needs it, so it is not installed for all. */
export async function noChromium(): Promise<string | undefined> {
  if (process.env["HOLDFAST_SERVERS"] === undefined) await installMissing([chromiumPackage]);
  return chromiumPackage.installed() ? undefined : `Chromium is not available: there is no ${PROGRAM}`;
}

export const openChromium = (): Promise<Browser> =>
  // It refuses to run as root with its sandbox.
  chromium.launch({ executablePath: PROGRAM, args: process.getuid?.() === 0 ? ["--no-sandbox"] : [] });
