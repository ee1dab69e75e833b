/** The texts about a kernel and its devices. */
import type { IDevice, IKernel, ISpan, IState } from './state';

/** How a kernel's state is drawn; the style sheet has the colours. */
export type Mood = 'idle' | 'here' | 'away' | 'moving' | 'waiting' | 'broken';

/** The same words as in `fractional_gpu/protocol/names.py`. */
const STATES: Record<string, [Mood, string]> = {
  unattached: ['idle', 'no process'],
  unarmed: ['idle', 'has not used the GPU'],
  suspending: ['moving', 'being suspended'],
  suspended: ['away', 'suspended'],
  resuming: ['moving', 'being resumed'],
  quarantined: ['broken', 'unknown, under examination'],
  ended: ['broken', 'ended']
};

/** 250 -> "1/4", 62 -> "1/16" (in whole thousandths), 230 -> "0.23", 1000 -> "1". */
export function share(milli: number): string {
  for (const parts of [1, 2, 3, 4, 5, 6, 8, 10, 12, 16]) {
    const numerator = Math.ceil((milli * parts) / 1000);
    if (Math.floor((numerator * 1000) / parts) === milli) {
      return parts === 1 ? `${numerator}` : `${numerator}/${parts}`;
    }
  }
  return `${milli / 1000}`;
}

/** 1536 -> "1.5 GiB". */
export function memory(mib: number): string {
  return mib < 1024 ? `${mib} MiB` : `${+(mib / 1024).toFixed(1)} GiB`;
}

const UNDER = 'under 1 s';

/** A duration in coarse steps, as `format_rough` in `fractional_gpu/core/units.py` has it. */
export function rough(ms: number): string {
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 1) {
    return UNDER;
  }
  if (seconds < 57.5) {
    return `${seconds < 10 ? Math.round(seconds) : 5 * Math.round(seconds / 5)} s`;
  }
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) {
    return `${Math.max(1, minutes)} min`;
  }
  const tens = Math.round(seconds / 600);
  return `${Math.floor(tens / 6)} h` + (tens % 6 ? ` ${10 * (tens % 6)} min` : '');
}

/** A forecast, as `format_forecast` there has it: "about 8 s (5 to 9)". */
export function forecast(span: ISpan): string {
  const [about, low, high] = [rough(span.expected_ms), rough(span.low_ms), rough(span.high_ms)];
  const text = about === UNDER ? about : `about ${about}`;
  if (low === high) {
    return text;
  }
  const unit = about.slice(about.indexOf(' '));
  const bounds = [low, high].filter(bound => bound !== UNDER);
  const once = about !== UNDER && bounds.every(bound => bound.slice(bound.indexOf(' ')) === unit);
  const from = once && low !== UNDER ? low.slice(0, -unit.length) : low;
  const to = once ? high.slice(0, -unit.length) : high;
  return from === UNDER ? `${text} (up to ${to})` : `${text} (${from} to ${to})`;
}

/** Whether a deadline is expected to destroy the kernel's memory: a host's always does. */
export function isAtRisk(kernel: IKernel): boolean {
  return typeof kernel.host_goes_away_in_ms === 'number' || Boolean(kernel.lost_because);
}

/** 14:05:09, with seconds because deadlines are near. */
function clock(at: Date): string {
  return at.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', second: '2-digit' });
}

/** That the kernel's GPU or host goes away, what to do, and why. JupyterLab shows only the beginning of a notification. */
export function deadlines(kernel: IKernel, gpuGoes: Date | null, hostGoes: Date | null): string {
  const parts: string[] = [];
  if (hostGoes !== null) {
    parts.push(`Its host goes away at ${clock(hostGoes)} with all of its memory: save to a disk that outlives it.`);
  }
  if (gpuGoes !== null) {
    parts.push(
      kernel.lost_because
        ? `Its GPU goes away at ${clock(gpuGoes)}, and it cannot be saved before: save to disk now. Why: ${kernel.lost_because}.`
        : `Its GPU goes away at ${clock(gpuGoes)}, and it is saved before.`
    );
  }
  return parts.join(' ');
}

export function mood(kernel: IKernel): Mood {
  if (isAtRisk(kernel)) {
    return 'broken';
  }
  return place(kernel);
}

function place(kernel: IKernel): Mood {
  if (kernel.position !== null && kernel.state !== 'resident') {
    return 'waiting';
  }
  return kernel.state === 'resident' ? 'here' : STATES[kernel.state]?.[0] ?? 'idle';
}

/** The kernel's state for screen readers, without numbers that change often. */
export function condition(kernel: IKernel): string {
  const risk = isAtRisk(kernel) ? ', its memory will be lost' : typeof kernel.goes_away_in_ms === 'number' ? ', its GPU goes away' : '';
  if (kernel.position !== null && kernel.state !== 'resident') {
    return `waiting for the GPU, place ${kernel.position}${risk}`;
  }
  return (kernel.state === 'resident' ? 'on the GPU' : STATES[kernel.state]?.[1] ?? kernel.state) + risk;
}

/** What the kernel uses of its memory: 0 MiB only if that was measured. */
function used(kernel: IKernel): string {
  return kernel.used_mib || kernel.measured ? `${memory(kernel.used_mib)} of ${memory(kernel.reserve_mib)}` : 'measuring';
}

/** The text in the status bar. */
export function line(kernel: IKernel, gpuGoes: Date | null, hostGoes: Date | null): string {
  const words = [`${share(kernel.fraction_milli)} GPU`];
  const goes = hostGoes ?? gpuGoes;
  if (goes !== null) {
    const what = hostGoes !== null ? 'host goes away' : kernel.lost_because ? 'cannot be saved, GPU goes away' : 'saved before GPU goes away';
    words.push(`${what} at ${clock(goes)}`);
  } else if (place(kernel) === 'here') {
    words.push(used(kernel));
  } else if (place(kernel) === 'waiting') {
    words.push(`waiting, place ${kernel.position}`);
    const who = kernel.sentence.indexOf('; '); // such as "9 GiB are needed, 1 GiB are free; python (your process 4711) holds 8 GiB"
    if (who >= 0) {
      words.push(kernel.sentence.slice(who + 2));
    }
  } else {
    words.push(condition(kernel));
  }
  if (kernel.pinned_ms > 0) {
    words.push('pinned');
  }
  return words.join(' · ') + (kernel.simulated ? ' (simulated)' : '');
}

export function facts(kernel: IKernel, pinnedUntil: Date | null, deadline: string, advice: string): [string, string][] {
  const rows: [string, string][] = [
    ['Share', `${share(kernel.fraction_milli)} GPU` + (kernel.pool === 'default' ? '' : `, pool ${kernel.pool}`)],
    ['State', condition(kernel)],
    place(kernel) === 'here'
      ? ['Memory', used(kernel)]
      : ['Memory', `up to ${memory(kernel.reserve_mib)}`]
  ];
  if (kernel.saved_mib > 0) {
    const back = kernel.resume === null ? '' : `; bringing it back takes ${forecast(kernel.resume)} once there is room`;
    rows.push(['Saved', `${memory(kernel.saved_mib)} in the host's memory${back}`]);
  }
  if (deadline) {
    rows.push(['Deadline', deadline]);
  }
  if (kernel.device_name && place(kernel) === 'here') {
    rows.push(['Device', kernel.device_name]);
  }
  if (kernel.slowdown_brief) {
    rows.push(['Speed', kernel.slowdown_brief]);
  }
  if (kernel.position !== null && kernel.expected !== null) {
    rows.push(['Wait', `${forecast(kernel.expected)} until it is on the GPU`]);
  }
  if (kernel.budget) {
    rows.push(['Budget', kernel.budget]);
  }
  if (pinnedUntil !== null) {
    rows.push(['Pinned', `until ${pinnedUntil.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' })}`]);
  }
  if (advice) {
    rows.push(['Advice', `${advice}.`]);
  }
  return rows;
}

function demand(device: IDevice): string {
  if (!device.demand_percent) {
    return '';
  }
  const slowed = device.demand_percent > 100 ? ', so they slow each other down' : '';
  return `busy kernels need about ${device.demand_percent} % of its compute${slowed}`;
}

export function deviceName(device: IDevice): string {
  return `${device.index}: ${device.name}`;
}

export function deviceLine(device: IDevice, goes: Date | null): string {
  const sizes = `${memory(device.reserved_mib)} of ${memory(device.memory_mib)} reserved, ${memory(device.used_mib)} used`;
  const trouble = device.lost
    ? 'lost'
    : device.over_committed
      ? 'over-committed'
      : device.draining && device.goes_away_in_ms && goes !== null
        ? `goes away at ${clock(goes)}: ${device.leases_saved} of its kernels will be saved, ${device.leases_lost} cannot be`
        : device.draining
          ? 'being emptied'
          : '';
  return [sizes, demand(device), trouble].filter(text => text).join(' · ');
}

export function possible(kernel: IKernel): Record<'suspend' | 'resume' | 'pin' | 'unpin', boolean> {
  return {
    suspend: kernel.state === 'resident',
    resume: kernel.state === 'suspended',
    pin: kernel.state !== 'ended' && kernel.state !== 'unattached',
    unpin: kernel.pinned_ms > 0
  };
}

export function hostTitle(state: IState): string {
  return state.simulated ? 'Devices of this host (simulated)' : 'Devices of this host';
}
